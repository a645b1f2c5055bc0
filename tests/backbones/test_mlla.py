"""Test MLLA against the published network, and by its definition; and its weight files."""
import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from golden_networks import PublishedNetwork, load_golden, logits_error
from helpers import assert_close

from subquad.backbones import mlla
from subquad.backbones.mixers import linear
from subquad.backbones.mlla import MLLA
from subquad.backbones.prepare import NativeLinearMixer
from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.registry import WEIGHTS
from subquad.kernels import native


def _build(config):
    return MLLA(dims=[config['embed_dim'] * 2 ** n for n in range(4)], depths=config['depths'],
                num_heads=config['num_heads'], mlp_ratio=config['mlp_ratio'],
                num_classes=config['num_classes'], output_norms=True)


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
    """With the tables of each block."""
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


class TestPublishedNetwork(PublishedNetwork):
    family, averaged, computed = 'mlla', 'state_dict_ema', 'rotations'
    build, authors_state = staticmethod(_build), staticmethod(_authors_state)
    parameters = dict(mlla_tiny=24_392_200, mlla_small=43_015_048, mlla_base=95_983_960)
    gmacs = dict(mlla_tiny=4.131, mlla_small=7.249, mlla_base=16.114)
    missing = {'layers.1.blocks.0.attn.qk.weight': 'stages.1.blocks.0.mixer.qk.weight'}


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


@pytest.mark.skipif(native.why_not() is not None, reason='the native operators are not built')
@pytest.mark.parametrize('batch, dim, heads, grid', [
    (2, 24, 1, (5, 7)), (1, 24, 6, (1, 9)), (3, 64, 2, (1, 1)), (0, 40, 2, (3, 3)), (1, 128, 4, (14, 15))])
def test_the_native_mixer_equals_its_definition(batch, dim, heads, grid):
    torch.manual_seed(0)
    mixer, x = linear.LinearMixer(dim, heads), torch.randn(batch, *grid, dim)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    expected = _by_definition(copy.deepcopy(mixer).double(), x.double())
    assert type(NativeLinearMixer.convert(mixer)) is NativeLinearMixer
    gradients = mixer(x)
    with torch.no_grad():
        for y in (mixer(x), mixer(x.mT.contiguous().mT), gradients):
            assert_close(y.double(), expected, 2e-6)
    assert gradients.requires_grad
    assert type(NativeLinearMixer.convert(linear.LinearMixer(12, 4))) is linear.LinearMixer


@pytest.mark.skipif(native.why_not() is not None, reason='the native operators are not built')
def test_the_native_operator_is_registered():
    table = linear.grid_table(2, 3, 8, torch.device('cpu'), torch.float32)
    torch.library.opcheck(torch.ops.subquad.linear_attention_native_fwd, (
        torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 8), table, 2, 1e-6),
        test_utils=('test_schema', 'test_faketensor', 'test_aot_dispatch_dynamic'))


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
    (golden, model), table = load_golden('mlla_square', _build), linear.grid_table
    monkeypatch.setattr(linear, 'kept_grid_table', lambda height, width, dim, *to: torch.cat(
        [table(height, width, 8, *to)] * (dim // 8), 1))                    # each head of 8 channels by itself
    assert logits_error(golden, model) > 0.01


def test_odd_maps_are_padded_before_the_first_convolution(monkeypatch):
    golden, model = load_golden('mlla_dense_odd', _build)
    pad = mlla.pad_to_multiple
    monkeypatch.setattr(mlla, 'pad_to_multiple', lambda x, factor: pad(x, factor) if factor == 4 else x)
    assert logits_error(golden, model) > 0.02


# ---- weight files

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
    assert [row.name for row in rows[:3]] == [
        'mlla_tiny.in1k', 'mlla_small.in1k', 'mlla_base.in1k']
    assert all(row.url.startswith('https://cloud.tsinghua.edu.cn/f/') and row.license == 'mit' for row in rows)
    assert timm.list_models('mlla*', pretrained=True) == sorted(row.name for row in rows[:3])
    assert timm.get_pretrained_cfg('mlla_tiny').license == 'mit' and len(rows) == 9
