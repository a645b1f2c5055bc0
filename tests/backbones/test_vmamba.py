"""Test VMamba against the published network: slips, scan elements and weight files."""
from collections import Counter

import pytest
import timm
import torch
from golden_networks import (
    PublishedNetwork,
    assert_same,
    load_golden,
    logits_error,
    on_meta,
    randomize,
)
from helpers import assert_close, relative_error
from pairwise import slow
from timm.optim import param_groups_weight_decay
from vmamba_files import authors_name, authors_state

from subquad.backbones.export import ExportScan, prepare_for_export
from subquad.backbones.mixers import selective
from subquad.backbones.vmamba import ARCHS, VMamba
from subquad.backbones.weights import WeightsError, load_weights
from subquad.backbones.weights.registry import WEIGHTS, find

# Parameters, dense GMACs and millions of scan elements (token, channel, path, state) at 224.
COUNTS = {
    'vmamba_tiny_s1l8': (30_249_064, 4.813, 6.3), 'vmamba_tiny_s2l5': (30_705_832, 4.716, 10.8),
    'vmamba_small_s2l15': (50_147_752, 8.499, 16.9), 'vmamba_small_s1l20': (49_012_840, 8.470, 9.9),
    'vmamba_base_s2l15': (88_557_800, 15.070, 22.5), 'vmamba_base_s1l20': (86_614_504, 15.031, 13.2),
    'vmamba_vanilla_tiny': (22_893_448, 3.677, 212), 'vmamba_vanilla_small': (44_417_416, 7.690, 385),
    'vmamba_vanilla_base': (76_254_056, 13.297, 514)}


def _build(config):
    return VMamba(dims=config['dims'], depths=config['depths'], ssm_ratio=config['ssm_ratio'],
                  vanilla=config['forward_type'] == 'v0', num_classes=config['num_classes'],
                  output_norms=True)


class TestPublishedNetwork(PublishedNetwork):
    family, gradients, counted = 'vmamba', 1e-4, ('vmamba_tiny_s1l8', 'vmamba_vanilla_tiny')
    build, authors_state = staticmethod(_build), staticmethod(authors_state)
    backends = ('auto', 'portable', 'export', *slow('reference'))
    parameters = {name: numbers[0] for name, numbers in COUNTS.items()}
    gmacs = {name: numbers[1] for name, numbers in COUNTS.items()}
    keys = dict(vmamba_tiny_s1l8=276, vmamba_vanilla_tiny=212)
    variants = [{}, dict(vanilla=True)]
    reported = [(options, 'averaged') for options in variants]
    missing = {'layers.1.blocks.0.op.dt_projs_bias': 'stages.1.blocks.0.mixer.scan.dt_bias'}

    def test_parameters_and_macs_equal_the_published_ones(self, counted, monkeypatch):
        elements = []

        def scan(u, delta, a, b, *others, paths):
            elements.append(u.numel() * b.shape[3] * b.shape[4] // u.shape[0])
            return u
        monkeypatch.setattr(selective, 'selective_scan', scan)
        super().test_parameters_and_macs_equal_the_published_ones(counted)
        assert len(elements) % 2 == 0                       # the network runs twice
        assert sum(elements) / 2e6 == pytest.approx(COUNTS[counted][2], rel=0.01)


# ---- slips

def _mixers(model):
    return [block.mixer for stage in model.stages for block in stage.blocks]


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
@pytest.mark.parametrize('name', ['vmamba_v2_ratio2_odd', 'vmamba_vanilla_odd'])
def test_each_part_of_the_mixer_matters(name, change):
    golden, model = load_golden(name, _build)
    for mixer in _mixers(model):
        change(mixer)
    assert logits_error(golden, model) > 0.1


def test_a_mean_of_the_paths_is_as_good_as_their_sum():
    """The code adds the four outputs up; the norm after it takes a constant factor away, but for its epsilon."""
    golden, model = load_golden('vmamba_v2_ratio2_odd', _build)
    for mixer in _mixers(model):
        mixer.scan.register_forward_hook(lambda module, args, y: y / 4)
    assert logits_error(golden, model) < 0.01


@pytest.mark.parametrize('vanilla', [False, True])
def test_the_export_form_scans_all_paths_at_once(vanilla):
    model, x = timm.create_model('test_vmamba', vanilla=vanilla).eval(), torch.randn(1, 3, 40, 32)
    with torch.no_grad():
        expected = model(x)
        prepare_for_export(model)
        assert sum(isinstance(module, ExportScan) for module in model.modules()) == 5
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

def test_old_names_and_convolutions_of_one_pixel(tmp_path):
    model = randomize(timm.create_model('test_vmamba', vanilla=True))
    old = {key.replace('patch_embed.0.', 'patch_embed.proj.').replace('patch_embed.2.', 'patch_embed.norm.')
           .replace('.op.', '.self_attention.').replace('classifier.', '')
           .replace('.norm.', '.ln_1.' if '.blocks.' in key else '.norm.'): value
           for key, value in authors_state(model).items()}
    assert {'head.weight', 'norm.bias', 'patch_embed.proj.weight', 'layers.2.blocks.1.ln_1.weight',
            'layers.0.blocks.0.self_attention.A_logs', 'layers.0.downsample.norm.weight'} <= old.keys()
    torch.save({'model': old}, tmp_path / 'ckpt.pth')
    loaded = timm.create_model('test_vmamba', vanilla=True)
    load_weights(loaded, tmp_path / 'ckpt.pth')
    assert_same(loaded.state_dict(), model.state_dict())
    model = randomize(timm.create_model('test_vmamba'))
    convolutions = {key: value[..., None, None] if value.ndim == 2 and key.endswith('proj.weight') or '.mlp.' in key
                    and value.ndim == 2 else value for key, value in authors_state(model).items()}
    assert convolutions['layers.0.blocks.0.mlp.fc1.weight'].ndim == 4
    loaded = timm.create_model('test_vmamba')
    loaded.load_state_dict(convolutions)
    assert_same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize('file, model', [
    ('tiny_s2l5', 'tiny_s1l8'), ('tiny_s1l8', 'tiny_s2l5'), ('vanilla_tiny', 'tiny_s2l5'),
    ('small_s2l15', 'base_s2l15'), ('small_s2l15', 'vanilla_small')])
def test_a_file_of_another_variant_is_named(file, model):
    networks = {name: on_meta(f'vmamba_{name}', output_norms=True) for name in (file, model)}
    state = authors_state(networks[file])
    for weights in (state, networks[file].state_dict()):
        with pytest.raises(WeightsError, match='^the file is of a VMamba with (vanilla=True, )?ssm_ratio=.*, and this '
                                               f'model has .*ssm_ratio=.*: build vmamba_{file}$') as caught:
            networks[model].translate_checkpoint(weights)
        ratios = [ARCHS[name]['ssm_ratio'] for name in (file, model)]
        assert [int(part[0]) for part in str(caught.value).split('ssm_ratio=')[1:]] == ratios
    narrow = authors_state(on_meta('test_vmamba', ssm_ratio=2.5))
    with pytest.raises(WeightsError, match='ssm_ratio=2.5, depths=.*: no published variant has these'):
        networks[model].translate_checkpoint(narrow)


def test_published_files():
    rows = [row for row in WEIGHTS.values() if row.format == 'vmamba']
    assert Counter(row.task for row in rows) == dict(classification=9, detection=13, segmentation=7)
    base = 'https://github.com/MzeroMiko/VMamba/releases/download/%23'
    assert all(row.url.startswith(base) and row.license == 'mit' and row.sha256 is None for row in rows)
    assert find('vmamba_tiny_s1l8').url == f'{base}v2cls/vssm1_tiny_0230s_ckpt_epoch_264.pth'
    assert find('vmamba_tiny_s2l5.mask_rcnn_3x_coco').url.endswith(
        '%23v2det/mask_rcnn_vssm_fpn_coco_tiny_ms_3x_epoch_36.pth')
    assert timm.get_pretrained_cfg('vmamba_tiny_s1l8').url == find('vmamba_tiny_s1l8').url
