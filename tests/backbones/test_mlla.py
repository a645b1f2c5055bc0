"""Test MLLA against the published network: parameters, MACs, outputs, gradients and weight files."""
import argparse
import json
import sys
import types

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import DATA, assert_close, relative_error
from pairwise import slow
from safetensors import safe_open

from subquad import kernels
from subquad.backbones import mlla
from subquad.backbones.mixers import linear
from subquad.backbones.mlla import MLLA
from subquad.backbones.weights import WeightsError, checkpoint_filter_fn, load_weights
from subquad.backbones.weights.convert import convert, published_format
from subquad.backbones.weights.registry import WEIGHTS
from subquad.tools.engine.counting.counts import count

GOLDEN = sorted(path.name for path in DATA.glob('mlla_*.safetensors'))
PARAMETERS = {'mlla_tiny': 24_392_200, 'mlla_small': 43_015_048, 'mlla_base': 95_983_960}
GMACS = {'mlla_tiny': 4.131, 'mlla_small': 7.249, 'mlla_base': 16.114}


@pytest.mark.parametrize('name', ['mlla_tiny', *slow('mlla_small', 'mlla_base')])
def test_parameters_and_macs_equal_the_published_ones(name):
    row = count(name, 224, 224)
    assert row['parameters'] == PARAMETERS[name]
    assert row['macs'] / 1e9 == pytest.approx(GMACS[name], rel=0.01)


def _golden(name):
    with safe_open(DATA / name, 'pt') as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()['config'])


def _part(golden, prefix):
    return {key.removeprefix(prefix): value for key, value in golden.items() if key.startswith(prefix)}


def _network(golden, config):
    model = MLLA(dims=[config['embed_dim'] * 2 ** n for n in range(4)], depths=config['depths'],
                 num_heads=config['num_heads'], mlp_ratio=config['mlp_ratio'], num_classes=config['num_classes'],
                 output_norms=True).eval()
    model.load_state_dict(_part(golden, 'state/'))
    return model


@pytest.mark.parametrize('backend', ['reference', 'portable', 'auto', 'export'])
@pytest.mark.parametrize('name', GOLDEN)
def test_outputs_and_gradients_equal_those_of_the_published_network(name, backend):
    golden, config = _golden(name)
    model, image = _network(golden, config), golden['input'].requires_grad_()
    with kernels.use_backend(backend):
        _, stages = model.forward_intermediates(image)
        _, normed = model.forward_intermediates(image, norm=True)
        logits = model(image)
        (logits * golden['cotangent']).sum().backward()
    for n in range(4):
        assert_close(stages[n], golden[f'stage{n + 1}'], 2e-5, f'stage{n + 1}')
        assert_close(normed[n], golden[f'outnorm{n}'], 2e-5, f'outnorm{n}')
    assert_close(logits, golden['logits'], 2e-5, 'logits')
    gradients = _part(golden, 'grad/')
    assert_close(image.grad, gradients.pop('input'), 5e-5, 'input')
    parameters = {key: value for key, value in model.named_parameters() if not key.startswith('output_norms.')}
    expected = checkpoint_filter_fn(gradients, model)
    assert parameters.keys() == expected.keys()
    for key, value in parameters.items():
        assert_close(value.grad, expected[key], 5e-5, key)


# ---- the mixer by its definition, and what of it the paper leaves open

def _by_definition(mixer, x):
    """Sum over all pairs of tokens, with complex numbers for the pairs of channels that rotate."""
    height, width, dim = x.shape[1:]
    v = F.silu(F.conv2d(mixer.value(x).permute(0, 3, 1, 2), mixer.conv.weight, mixer.conv.bias, padding=1, groups=dim))
    local = F.conv2d(v, mixer.lepe.weight, mixer.lepe.bias, padding=1, groups=dim).permute(0, 2, 3, 1)
    v = v.permute(0, 2, 3, 1)
    q, k = F.linear(v, mixer.qk.weight[:dim], mixer.qk.bias[:dim]), F.linear(v, mixer.qk.weight[dim:],
                                                                             mixer.qk.bias[dim:])
    q, k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, k))
    angles = torch.zeros(height, width, dim // 2, dtype=x.dtype)
    for pair in range(dim // 2):
        row = pair < dim // 4
        place = torch.arange(height).double()[:, None] if row else torch.arange(width).double()
        angles[..., pair] = place * 10000 ** -((pair if row else pair - dim // 4) / (dim // 4))
    turned = [torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * torch.polar(
        torch.ones_like(angles), angles)).flatten(-2) for y in (q, k)]
    q, k, turned_q, turned_k, v = (y.flatten(1, 2).unflatten(-1, (mixer.num_heads, -1)) for y in (q, k, *turned, v))
    products = torch.einsum('bnhd,bmhd->bhnm', turned_q, turned_k)
    weights = torch.einsum('bnhd,bmhd->bhnm', q, k)
    y = torch.einsum('bhnm,bmhd->bnhd', products / (weights.sum(-1, keepdim=True) + 1e-6 * height * width), v)
    return mixer.out((y.reshape(x.shape) + local) * F.silu(mixer.gate(x)))


@pytest.mark.parametrize('heads, grid', [(1, (5, 7)), (3, (4, 6)), (2, (1, 1)), (6, (1, 9))])
def test_the_mixer_equals_its_definition(heads, grid):
    torch.manual_seed(0)
    mixer, x = linear.LinearMixer(24, heads).double(), torch.randn(2, *grid, 24, dtype=torch.float64)
    with torch.no_grad():
        assert_close(mixer(x), _by_definition(mixer, x), 1e-12)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
def test_sums_over_tokens_keep_float32(dtype, tolerance):
    """In float16, the sums of 12,288 keys of 40 and more would be infinite."""
    torch.manual_seed(0)
    mixer = linear.LinearMixer(16, 2)
    torch.nn.init.constant_(mixer.qk.bias, 40)
    x = torch.randn(1, 96, 128, 16)
    with torch.no_grad():
        expected = mixer(x)
        with torch.autocast('cpu', dtype):
            assert_close(mixer(x), expected.to(dtype), tolerance)
        assert_close(mixer.to(dtype)(x.to(dtype)), expected.to(dtype), tolerance)


def test_rotation_covers_all_channels_before_they_are_split_into_heads(monkeypatch):
    golden, config = _golden('mlla_square.safetensors')
    model, table = _network(golden, config), linear.grid_table
    monkeypatch.setattr(linear, 'kept_grid_table', lambda height, width, dim, *to: torch.cat(
        [table(height, width, 8, *to)] * (dim // 8), 1))                    # each head of 8 channels by itself
    with torch.no_grad():
        assert relative_error(model(golden['input']), golden['logits']) > 0.01


def test_odd_maps_are_padded_before_the_first_convolution(monkeypatch):
    golden, config = _golden('mlla_dense_odd.safetensors')
    model = _network(golden, config)
    pad = mlla.pad_to_multiple
    monkeypatch.setattr(mlla, 'pad_to_multiple', lambda x, factor: pad(x, factor) if factor == 4 else x)
    with torch.no_grad():
        logits = model(golden['input'])
    assert logits.shape == golden['logits'].shape and relative_error(logits, golden['logits']) > 0.02


# ---- weight files

# The authors' names, written down from their code and not from this package's key map.
_PARTS = {'pos1': 'cpe1', 'pos2': 'cpe2', 'mixer.gate': 'act_proj', 'mixer.value': 'in_proj', 'mixer.conv': 'dwc',
          'mixer.qk': 'attn.qk', 'mixer.lepe': 'attn.lepe', 'mixer.out': 'out_proj'}
_DOWNSAMPLE = {'conv1': '0.conv', 'conv2': '1.conv', 'conv3.conv': '2.conv', 'conv3.norm': '2.norm'}


def _authors_name(key):
    module, _, leaf = key.rpartition('.')
    words = module.split('.')
    if words[0] == 'stem':
        return f"patch_embed.{'.'.join(words[1:])}.{leaf}"
    if words[0] == 'head':
        return {'norm': f'norm.{leaf}', 'fc': f'head.{leaf}'}[words[1]]
    if words[0] == 'output_norms':
        return f'norm{words[1]}.{leaf}'
    rest = '.'.join(words[3:])
    if words[2] == 'downsample':
        return f'layers.{int(words[1]) - 1}.downsample.conv.{_DOWNSAMPLE[rest]}.{leaf}'
    part = '.'.join(words[4:])
    return f'layers.{words[1]}.blocks.{words[3]}.{_PARTS.get(part, part)}.{leaf}'


def _authors_state(model, side=56):
    """The state dict of a model as its authors' files have it, with the tables of each block."""
    state = {_authors_name(key): value for key, value in model.state_dict().items()}
    for number, stage in enumerate(model.stages):
        grid, pairs = side >> number, stage.blocks[0].norm1.weight.numel() // 4
        angles = torch.arange(grid)[:, None] / 10000 ** (torch.arange(pairs) / pairs)
        rows, columns = (x.expand(grid, grid, pairs) for x in (angles[:, None], angles))
        angles = torch.cat([rows, columns], -1)
        for block in range(len(stage.blocks)):
            state[f'layers.{number}.blocks.{block}.attn.rope.rotations'] = torch.stack(
                [angles.cos(), angles.sin()], -1)
    return state


def _random(name, **options):
    """Build a network with random values for all weights."""
    model = timm.create_model(name, **options)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.normal_()
    return model


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize('name', [*PARAMETERS, 'test_mlla'])
def test_every_key_has_one_published_name(name):
    with torch.device('meta'):
        model = timm.create_model(name, output_norms=True)
        theirs = _authors_state(model)
    shapes = {key: value.shape for key, value in model.published_state(model.state_dict()).items()}
    assert shapes == {key: value.shape for key, value in theirs.items()}
    back = model.translate_checkpoint(theirs)
    assert {key: value.shape for key, value in back.items()} == {
        key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize('name', GOLDEN)
def test_golden_names_come_back(name):
    golden, config = _golden(name)
    theirs = _part(golden, 'state/')
    model = _network(golden, config)
    back = model.published_state(model.translate_checkpoint(theirs))
    assert back.keys() == theirs.keys()
    for key, value in theirs.items():
        if 'rotations' in key:                           # the golden networks were built for smaller images
            assert_close(back[key][:len(value), :len(value)], value, 1e-6, key)
        else:
            assert torch.equal(back[key], value)


class CfgNode(dict):
    """What yacs stores in the files of training scripts."""

    def __init__(self, content):
        super().__init__(content)
        self.__dict__['__immutable__'] = False


@pytest.fixture
def config(monkeypatch):
    """A config of yacs, which is not installed."""
    monkeypatch.setitem(sys.modules, 'yacs', types.ModuleType('yacs'))
    monkeypatch.setitem(sys.modules, 'yacs.config', types.SimpleNamespace(CfgNode=CfgNode))
    monkeypatch.setattr(CfgNode, '__module__', 'yacs.config')
    return CfgNode({'MODEL': CfgNode({'NAME': 'MLLA_tiny', 'DROP': [0.0, 0.2]})})


@pytest.mark.parametrize('wrap', [
    lambda state, config: state, lambda state, config: {'model': state, 'args': argparse.Namespace(lr=1e-3)},
    lambda state, config: {'model': state, 'optimizer': {'state': {}, 'param_groups': [{'lr': 1e-3}]},
                           'lr_scheduler': {'t_in_epochs': False}, 'max_accuracy': 83.5, 'config': config},
    lambda state, config: {'state_dict': {f'backbone.{key}': value for key, value in state.items()}}],
    ids=['bare', 'model', 'training', 'state_dict'])
def test_published_files_load_strictly(wrap, config, tmp_path):
    model = _random('test_mlla', num_classes=5)
    state = _authors_state(model)
    torch.save(wrap(state, config), tmp_path / 'MLLA.pth')
    loaded = timm.create_model('test_mlla', num_classes=5)
    load_weights(loaded, tmp_path / 'MLLA.pth')
    assert _same(loaded.state_dict(), model.state_dict())
    state.pop('layers.1.blocks.0.attn.qk.weight')
    torch.save(wrap(state, config), tmp_path / 'less.pth')
    with pytest.raises(WeightsError, match='1 keys missing .stages.1.blocks.0.mixer.qk.weight'):
        load_weights(loaded, tmp_path / 'less.pth')


def test_the_copy_that_the_authors_report_is_read(tmp_path):
    models = {kind: _random('test_mlla') for kind in ('raw', 'averaged')}
    torch.save({'model': _authors_state(models['raw']), 'state_dict_ema': _authors_state(models['averaged'])},
               tmp_path / 'MLLA.pth')
    loaded = timm.create_model('test_mlla')
    for weights, read in ((None, 'raw'), ('averaged', 'averaged')):
        with pytest.warns(UserWarning, match=f'its {read} weights .* are read'):
            load_weights(loaded, tmp_path / 'MLLA.pth', weights=weights)
        assert _same(loaded.state_dict(), models[read].state_dict())


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_files_convert_both_ways(dtype, tmp_path):
    model = _random('test_mlla', num_classes=5).to(dtype)
    torch.save({'model': {key: value.to(dtype) if value.is_floating_point() else value
                          for key, value in _authors_state(model).items()}}, tmp_path / 'MLLA.pth')
    ours = convert(tmp_path / 'MLLA.pth', tmp_path / 'ours.safetensors', model)
    assert ours.metadata['provenance']['format'] == 'mlla' and _same(ours.weights, model.state_dict())
    theirs = convert(tmp_path / 'ours.safetensors', tmp_path / 'theirs.pth', model, to='mlla').weights
    assert published_format(theirs) == 'mlla' and theirs.keys() == _authors_state(model).keys()


def test_files_of_other_networks_are_refused_in_a_sentence():
    model = timm.create_model('test_mlla')
    state = _authors_state(model)
    state['layers.2.blocks.1.attn.rope.rotations'] = state['layers.2.blocks.1.attn.rope.rotations'] + 0.1
    with pytest.raises(WeightsError, match='layers.2.blocks.1.attn.rope.rotations holds other rotations'):
        model.load_state_dict(state)
    state['layers.2.blocks.1.attn.rope.rotations'] = torch.zeros(3)
    with pytest.raises(WeightsError, match=r'rope.rotations must hold the rotary embedding as \(H, W, C / 2, 2\)'):
        model.load_state_dict(state)


def test_weights_are_listed_with_their_addresses():
    rows = [row for row in WEIGHTS.values() if row.format == 'mlla']
    assert [row.name for row in rows[:3]] == [f'{name}.in1k' for name in PARAMETERS]
    assert all(row.url.startswith('https://cloud.tsinghua.edu.cn/f/') and row.license == 'mit' for row in rows)
    assert timm.list_models('mlla*', pretrained=True) == sorted(f'{name}.in1k' for name in PARAMETERS)
    assert timm.get_pretrained_cfg('mlla_tiny').license == 'mit' and len(rows) == 9
