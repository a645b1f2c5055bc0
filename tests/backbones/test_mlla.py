"""Test MLLA against the published network: parameters, MACs, outputs, gradients and weight files."""
import json

import pytest
import torch
import torch.nn.functional as F
from helpers import DATA, assert_close, relative_error
from pairwise import slow
from safetensors import safe_open

from subquad import kernels
from subquad.backbones import mlla
from subquad.backbones.mixers import linear
from subquad.backbones.mlla import MLLA
from subquad.backbones.weights import checkpoint_filter_fn
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
