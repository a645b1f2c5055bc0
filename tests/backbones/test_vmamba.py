"""Test VMamba against the published network: parameters, MACs, outputs, gradients, weight files, slips."""
import json
import sys
from collections import Counter
from types import ModuleType

import pytest
import timm
import torch
from helpers import DATA, assert_close, relative_error
from pairwise import slow
from safetensors import safe_open
from timm.optim import param_groups_weight_decay
from vmamba_files import authors_name, authors_state

from subquad import kernels
from subquad.backbones.export import SeparateScans, prepare_for_export
from subquad.backbones.mixers import selective
from subquad.backbones.vmamba import ARCHS, VMamba
from subquad.backbones.weights import WeightsError, checkpoint_filter_fn, load_weights, read_file
from subquad.backbones.weights.convert import convert, published_format
from subquad.backbones.weights.registry import WEIGHTS, find
from subquad.tools.engine.counting.counts import count

GOLDEN = sorted(path.name for path in DATA.glob('vmamba_*.safetensors'))
# Parameters, dense GMACs and millions of scan elements (token, channel, path, state) at 224.
COUNTS = {
    'vmamba_tiny_s1l8': (30_249_064, 4.813, 6.3), 'vmamba_tiny_s2l5': (30_705_832, 4.716, 10.8),
    'vmamba_small_s2l15': (50_147_752, 8.499, 16.9), 'vmamba_small_s1l20': (49_012_840, 8.470, 9.9),
    'vmamba_base_s2l15': (88_557_800, 15.070, 22.5), 'vmamba_base_s1l20': (86_614_504, 15.031, 13.2),
    'vmamba_vanilla_tiny': (22_893_448, 3.677, 212), 'vmamba_vanilla_small': (44_417_416, 7.690, 385),
    'vmamba_vanilla_base': (76_254_056, 13.297, 514)}


@pytest.mark.parametrize('name', ['vmamba_tiny_s1l8', 'vmamba_vanilla_tiny', *slow(*(
    name for name in COUNTS if 'tiny_s1' not in name and 'vanilla_tiny' not in name))])
def test_parameters_macs_and_scan_elements_equal_the_published_ones(name, monkeypatch):
    elements = []

    def scan(u, delta, a, b, *others, paths):
        elements.append(u.numel() * b.shape[3] * b.shape[4] // u.shape[0])
        return u
    monkeypatch.setattr(selective, 'selective_scan', scan)
    row = count(name, 224, 224)
    parameters, gmacs, scanned = COUNTS[name]
    assert row['parameters'] == parameters and row['macs'] / 1e9 == pytest.approx(gmacs, rel=0.01)
    assert len(elements) % 2 == 0                       # the network runs twice
    assert sum(elements) / 2e6 == pytest.approx(scanned, rel=0.01)


def _golden(name):
    with safe_open(DATA / name, 'pt') as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()['config'])


def _part(golden, prefix):
    return {key.removeprefix(prefix): value for key, value in golden.items() if key.startswith(prefix)}


def _network(golden, config):
    model = VMamba(dims=config['dims'], depths=config['depths'], ssm_ratio=config['ssm_ratio'],
                   vanilla=config['forward_type'] == 'v0', num_classes=config['num_classes'], output_norms=True).eval()
    model.load_state_dict(_part(golden, 'state/'))
    return model


@pytest.mark.parametrize('backend', ['auto', 'portable', 'export', *slow('reference')])
@pytest.mark.parametrize('name', GOLDEN)
def test_outputs_and_gradients_equal_those_of_the_published_network(name, backend):
    golden, config = _golden(name)
    model, image = _network(golden, config), golden['input'].requires_grad_()
    with kernels.use_backend(backend):
        _, stages = model.forward_intermediates(image)
        _, normed = model.forward_intermediates(image, norm=True)
        logits = model(image)
        (logits * golden['cotangent']).sum().backward()
        with torch.no_grad():
            assert_close(model(image), golden['logits'], 2e-5, 'logits without gradients')
    for n in range(4):
        assert_close(stages[n], golden[f'stage{n + 1}'], 2e-5, f'stage{n + 1}')
        assert_close(normed[n], golden[f'outnorm{n}'], 2e-5, f'outnorm{n}')
    assert_close(logits, golden['logits'], 2e-5, 'logits')
    gradients = _part(golden, 'grad/')
    assert_close(image.grad, gradients.pop('input'), 1e-4, 'input')
    parameters = {key: value for key, value in model.named_parameters() if not key.startswith('output_norms.')}
    expected = checkpoint_filter_fn(gradients, model)
    assert parameters.keys() == expected.keys()
    for key, value in parameters.items():
        assert_close(value.grad, expected[key], 1e-4, key)


# ---- slips

def _swap_columns(mixer):
    mixer.scan.paths = ('right', 'up', 'left', 'down')


def _only_right(mixer):
    with torch.no_grad():
        mixer.scan.D[1:] = 0
        mixer.scan.x_proj.weight.unflatten(0, (4, -1))[1:] = 0            # the other paths expand and shrink nothing


def _without(part):
    return lambda mixer: setattr(mixer, part, torch.nn.Identity())


@pytest.mark.parametrize('change', [
    _swap_columns, _only_right, lambda mixer: mixer.scan.D.data.zero_(), _without('norm'), _without('conv')],
    ids=['columns', 'paths', 'D', 'norm', 'conv'])
@pytest.mark.parametrize('name', GOLDEN)
def test_each_part_of_the_mixer_matters(name, change):
    golden, config = _golden(name)
    model = _network(golden, config)
    for stage in model.stages:
        for block in stage.blocks:
            change(block.mixer)
    with torch.no_grad():
        assert relative_error(model(golden['input']), golden['logits']) > 0.1


def test_a_mean_of_the_paths_is_as_good_as_their_sum():
    """The code adds the four outputs up; the norm after it takes a constant factor away, but for its epsilon."""
    golden, config = _golden('vmamba_v2_ratio2_odd.safetensors')
    model = _network(golden, config)
    for stage in model.stages:
        for block in stage.blocks:
            block.mixer.scan.register_forward_hook(lambda module, args, y: y / 4)
    with torch.no_grad():
        assert relative_error(model(golden['input']), golden['logits']) < 0.01


@pytest.mark.parametrize('vanilla', [False, True])
def test_the_export_form_scans_each_path_alone(vanilla):
    model, x = timm.create_model('test_vmamba', vanilla=vanilla).eval(), torch.randn(1, 3, 40, 32)
    with torch.no_grad():
        expected = model(x)
        prepare_for_export(model)
        assert sum(isinstance(module, SeparateScans) for module in model.modules()) == 5
        assert relative_error(model(x), expected) < 1e-5


@pytest.mark.parametrize('vanilla', [False, True])
def test_weight_decay_follows_the_authors_rule(vanilla):
    """Their marks on A_logs and Ds are never read: what has an axis in their files only, or is a bias, is exempt."""
    model = timm.create_model('test_vmamba', vanilla=vanilla, device='meta')
    theirs = {authors_name(key, vanilla): key for key in model.state_dict()}
    exempt = {theirs[key] for key, value in authors_state(model).items() if value.ndim < 2 or key.endswith('.bias')}
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    names = {id(value): key for key, value in model.named_parameters()}
    found = {names[id(value)] for group in groups if not group['weight_decay'] for value in group['params']}
    assert found == exempt and any(key.endswith('.D') for key in found)
    assert not any(key.endswith(('.A_log', '.dt_bias')) for key in found)


def test_initial_values():
    torch.manual_seed(0)
    model = timm.create_model('test_vmamba', vanilla=True)
    scan = model.stages[3].blocks[0].mixer.scan
    assert_close(scan.A_log.exp(), torch.arange(1., 17).expand(4, 128, 16))
    steps = torch.nn.functional.softplus(scan.dt_bias)
    assert 1e-3 * 0.999 < steps.min() < 2e-3 and 0.05 < steps.max() < 0.1001 and (scan.D == 1).all()
    for weight, bound in ((scan.dt_proj.weight, 8 ** -0.5), (scan.x_proj.weight, 128 ** -0.5)):
        assert 0.95 * bound < weight.abs().max() <= bound
    for weight in (model.stages[3].blocks[0].mixer.in_proj.weight, model.stages[3].downsample.reduction.weight):
        assert 0.015 < weight.std() < 0.025


# ---- weight files

def _random(**options):
    """Build a network with random values for all weights."""
    model = timm.create_model('test_vmamba', num_classes=5, **options)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.normal_()
    return model


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize('name', [f'vmamba_{arch}' for arch in ARCHS if arch != 'test'])
def test_every_key_has_one_published_name(name):
    model = timm.create_model(name, device='meta')
    assert len(model.state_dict()) == {'vmamba_tiny_s1l8': 276, 'vmamba_vanilla_tiny': 212}.get(
        name, len(model.state_dict()))
    model = VMamba(output_norms=True, device='meta', **ARCHS[name.removeprefix('vmamba_')])
    theirs = authors_state(model)
    shapes = {key: value.shape for key, value in model.published_state(model.state_dict()).items()}
    assert shapes == {key: value.shape for key, value in theirs.items()}
    assert {key: value.shape for key, value in model.translate_checkpoint(theirs).items()} == {
        key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize('name', GOLDEN)
def test_golden_names_come_back(name):
    golden, config = _golden(name)
    theirs = _part(golden, 'state/')
    model = _network(golden, config)
    assert _same(model.published_state(model.translate_checkpoint(theirs)), theirs)
    assert _same(authors_state(model), theirs)


@pytest.fixture
def yacs(monkeypatch):
    """A stand-in for the class of the configs in the authors' files, which need not be installed to read them."""
    module = ModuleType('yacs.config')
    module.CfgNode = type('CfgNode', (dict,), {'__module__': 'yacs.config'})
    monkeypatch.setitem(sys.modules, 'yacs', ModuleType('yacs'))
    monkeypatch.setitem(sys.modules, 'yacs.config', module)

    def node(**entries):
        made = module.CfgNode(entries)
        made.__dict__.update(__immutable__=True, __deprecated_keys__=set())
        return made
    return node


CONTAINERS = {
    'bare': lambda state, node: state,
    'model': lambda state, node: {'model': state},
    'training': lambda state, node: {
        'model': state, 'optimizer': {'state': {}, 'param_groups': [{'lr': 5e-4}]}, 'lr_scheduler': {}, 'scaler': {},
        'max_accuracy': 82.6, 'epoch': 264, 'config': node(MODEL=node(TYPE='vssm', DROP_PATH_RATE=0.2), BASE=[''])},
    'averaged': lambda state, node: {'model': {key: 0 * value for key, value in state.items()}, 'model_ema': state},
    'detector': lambda state, node: {'meta': {}, 'state_dict': {f'backbone.{key}': x for key, x in state.items()}},
}


@pytest.mark.parametrize('vanilla', [False, True])
@pytest.mark.parametrize('container', CONTAINERS)
def test_published_files_load_strictly(container, vanilla, tmp_path, yacs, recwarn):
    model = _random(vanilla=vanilla)
    state = authors_state(model)
    torch.save(CONTAINERS[container](state, yacs), tmp_path / 'ckpt.pth')
    loaded = timm.create_model('test_vmamba', num_classes=5, vanilla=vanilla)
    load_weights(loaded, tmp_path / 'ckpt.pth')
    assert _same(loaded.state_dict(), model.state_dict())
    notes = ' '.join(str(warning.message) for warning in recwarn)
    assert ('averaged weights (model_ema) are read, not the raw ones' in notes) == (container == 'averaged')
    state.pop('layers.1.blocks.0.op.dt_projs_bias')
    torch.save(CONTAINERS[container](state, yacs), tmp_path / 'less.pth')
    with pytest.raises(WeightsError, match='1 keys missing .stages.1.blocks.0.mixer.scan.dt_bias'):
        load_weights(loaded, tmp_path / 'less.pth')


def test_old_names_and_convolutions_of_one_pixel(tmp_path):
    model = _random(vanilla=True)
    old = {key.replace('patch_embed.0.', 'patch_embed.proj.').replace('patch_embed.2.', 'patch_embed.norm.')
           .replace('.op.', '.self_attention.').replace('classifier.', '')
           .replace('.norm.', '.ln_1.' if '.blocks.' in key else '.norm.'): value
           for key, value in authors_state(model).items()}
    assert {'head.weight', 'norm.bias', 'patch_embed.proj.weight', 'layers.2.blocks.1.ln_1.weight',
            'layers.0.blocks.0.self_attention.A_logs', 'layers.0.downsample.norm.weight'} <= old.keys()
    torch.save({'model': old}, tmp_path / 'ckpt.pth')
    loaded = timm.create_model('test_vmamba', num_classes=5, vanilla=True)
    load_weights(loaded, tmp_path / 'ckpt.pth')
    assert _same(loaded.state_dict(), model.state_dict())
    model = _random()
    convolutions = {key: value[..., None, None] if value.ndim == 2 and key.endswith('proj.weight') or '.mlp.' in key
                    and value.ndim == 2 else value for key, value in authors_state(model).items()}
    assert convolutions['layers.0.blocks.0.mlp.fc1.weight'].ndim == 4
    loaded = timm.create_model('test_vmamba', num_classes=5)
    loaded.load_state_dict(convolutions)
    assert _same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize('file, model', [
    ('tiny_s2l5', 'tiny_s1l8'), ('tiny_s1l8', 'tiny_s2l5'), ('vanilla_tiny', 'tiny_s2l5'),
    ('small_s2l15', 'base_s2l15'), ('small_s2l15', 'vanilla_small')])
def test_a_file_of_another_variant_is_named(file, model):
    networks = {name: VMamba(device='meta', **ARCHS[name]) for name in (file, model)}
    state = authors_state(networks[file])
    for weights in (state, networks[file].state_dict()):
        with pytest.raises(WeightsError, match='^the file is of a VMamba with (vanilla=True, )?ssm_ratio=.*, and this '
                                               f'model has .*ssm_ratio=.*: build vmamba_{file}$') as caught:
            networks[model].translate_checkpoint(weights)
        ratios = [ARCHS[name]['ssm_ratio'] for name in (file, model)]
        assert [int(part[0]) for part in str(caught.value).split('ssm_ratio=')[1:]] == ratios
    narrow = authors_state(timm.create_model('test_vmamba', ssm_ratio=2.5, device='meta'))
    with pytest.raises(WeightsError, match='ssm_ratio=2.5, depths=.*: no published variant has these'):
        networks[model].translate_checkpoint(narrow)


def test_files_convert_both_ways(tmp_path):
    model = _random(output_norms=True)
    torch.save({'model': authors_state(model)}, tmp_path / 'theirs.pth')
    assert published_format(read_file(tmp_path / 'theirs.pth').weights) == 'vmamba'
    convert(tmp_path / 'theirs.pth', tmp_path / 'ours.safetensors', model)
    assert _same(read_file(tmp_path / 'ours.safetensors').weights, model.state_dict())
    convert(tmp_path / 'ours.safetensors', tmp_path / 'back.pth', model, 'vmamba')
    assert _same(read_file(tmp_path / 'back.pth').weights, authors_state(model))


def test_published_files():
    rows = [row for row in WEIGHTS.values() if row.format == 'vmamba']
    assert Counter(row.task for row in rows) == dict(classification=9, detection=13, segmentation=7)
    base = 'https://github.com/MzeroMiko/VMamba/releases/download/%23'
    assert all(row.url.startswith(base) and row.license == 'mit' and row.sha256 is None for row in rows)
    assert find('vmamba_tiny_s1l8').url == f'{base}v2cls/vssm1_tiny_0230s_ckpt_epoch_264.pth'
    assert find('vmamba_tiny_s2l5.mask_rcnn_3x_coco').url.endswith(
        '%23v2det/mask_rcnn_vssm_fpn_coco_tiny_ms_3x_epoch_36.pth')
    assert timm.get_pretrained_cfg('vmamba_tiny_s1l8').url == find('vmamba_tiny_s1l8').url
