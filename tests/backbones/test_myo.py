"""Test Myo: its mixer, its backbones and influences, and the sequence network with its baseline."""
import copy
import math

import pytest
import timm
import torch
from helpers import assert_close
from pairwise import slow
from timm.optim import param_groups_layer_decay

from subquad.backbones.mixers import TreeMixer
from subquad.backbones.mixers.scan import ScanMixer, hippo_normal_eigenvalues
from subquad.backbones.mixers.tree_sequence import Nodes, TreeSequenceMixer
from subquad.kernels.trees import PARAMETRIZATIONS, grid_order
from subquad.tools.engine.counting.counts import count

PARAMETERS = {'myo_tiny': 14e6, 'myo_small': 27e6, 'myo_base': 54e6}


@pytest.mark.parametrize('name', ['myo_tiny', *slow('myo_small', 'myo_base')])
def test_parameters_and_macs_are_those_of_ppma(name):
    row = count(name, 224, 224)
    assert row['parameters'] == pytest.approx(PARAMETERS[name], rel=0.1)
    assert row['macs_without_attention'] < row['macs'] < 1.05 * row['macs_without_attention']


@pytest.mark.parametrize('size', [(32, 32), (33, 200), (65, 97), (32, 257)])
def test_feature_maps_of_any_size(size):
    model = timm.create_model('test_myo', features_only=True).eval()
    x = torch.randn(1, 3, *size)
    for stride, features in zip((4, 8, 16, 32), model(x)):
        assert features.shape[2:] == tuple(math.ceil(n / stride) for n in size) and features.isfinite().all()
    with pytest.raises(ValueError, match='H and W >= 32'):
        model(torch.randn(1, 3, 31, 64))


def test_options_of_the_tree_mixer():
    with pytest.raises(ValueError, match='rho must be between'):
        TreeMixer(8, 2, rho=1.0)
    static = timm.create_model('test_myo', static_edges=True)
    assert not any('query' in name for name, _ in static.named_parameters())
    flags = [block.mixer.shift_grid for stage in timm.create_model('myo_tiny', device='meta').stages
             for block in stage.blocks]
    assert flags == [n % 2 == 1 for depth in (2, 2, 8, 2) for n in range(depth)]
    assert not any(block.mixer.shift_grid for stage in timm.create_model('test_myo', shifted_blocks=False).stages
                   for block in stage.blocks)


@pytest.mark.parametrize('parametrization', PARAMETRIZATIONS)
@pytest.mark.parametrize('shift_grid', [False, True])
def test_padding_does_not_affect_tokens(parametrization, shift_grid):
    torch.manual_seed(0)
    mixer = TreeMixer(16, 2, parametrization, shift_grid=shift_grid)
    mask = torch.zeros(2, 9, 14, dtype=torch.bool)
    mask[0, :7, :14] = mask[1, :9, :5] = True
    x = torch.randn(2, 9, 14, 16)
    outputs = [mixer(torch.where(mask[..., None], x, padding), mask)[mask]
               for padding in (0.0, 50.0, 3e38, math.inf, math.nan)]
    assert all((outputs[0] - y).abs().max() < 1e-6 for y in outputs[1:])
    if not shift_grid:                                                     # the tokens are solved as without padding
        assert_close(mixer(x, mask)[0, :7], mixer(x[:1, :7])[0])


def test_initial_edges_grow_fourfold_and_the_grid_shifts():
    mixer = TreeMixer(16, 2, static_edges=True)
    levels = mixer.levels(8, 8)
    edges = mixer.edges(torch.randn(1, 8, 8, 16), levels)
    for n, edge in enumerate(edges):
        assert_close(edge, edges[0][:, :, :1, :1].expand_as(edge) * 4 ** n)
    shifted = TreeMixer(16, 2, static_edges=True, shift_grid=True)
    shifted.load_state_dict(mixer.state_dict())
    assert shifted.levels(8, 8)[0][2:] == (2, 2)
    x = torch.zeros(1, 8, 8, 16)
    x[0, 3, 3] = 1
    # The tokens at 3 and 4 have only the root in common, but a lower node in the shifted tree.
    share = [mixer.influence(x, 4, 4, mixer.edges(x, mixer.levels(8, 8)))[0, 0, 3, 3],
             shifted.influence(x, 4, 4, shifted.edges(x, shifted.levels(8, 8)))[0, 0, 3, 3]]
    assert share[1] > 2 * share[0] and not torch.equal(mixer(x), shifted(x))


def test_max_levels_limits_mixing_to_windows():
    mixer = TreeMixer(16, 2, max_levels=3)
    x = torch.randn(1, 8, 8, 16)
    other = x.clone()
    other[:, :4, :4] += 1
    changed = (mixer(x) - mixer(other)).abs().amax(-1)[0] > 1e-6
    assert changed[:4, :4].all() and not changed[4:].any() and not changed[:, 4:].any()
    whole = TreeMixer(16, 2)
    assert ((whole(x) - whole(other)).abs().amax(-1)[0] > 1e-9).all()


@pytest.mark.parametrize('parametrization', [PARAMETRIZATIONS[0], *slow(*PARAMETRIZATIONS[1:])])
def test_training_in_bfloat16_with_large_edges(parametrization):
    """Train for 500 steps under autocast. Every 50 steps the edges become random and large."""
    torch.manual_seed(0)
    mixer = TreeMixer(16, 2, parametrization, shift_grid=True)
    optimizer = torch.optim.AdamW(mixer.parameters(), lr=1e-2)
    for step in range(500):
        if step % 50 == 0:
            with torch.no_grad():
                mixer.edge_bias.copy_(100 * torch.randn_like(mixer.edge_bias))
                mixer.query.weight.copy_(10 * torch.randn_like(mixer.query.weight))
        x = 3 * torch.randn(2, 7, 6, 16)
        with torch.autocast('cpu', torch.bfloat16):
            loss = (mixer(x).float() - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert loss.isfinite() and all(p.grad.isfinite().all() for p in mixer.parameters()), step
        optimizer.step()


def test_influences_are_rows_of_the_inverse():
    torch.manual_seed(0)
    model = timm.create_model('test_myo')
    x = torch.randn(2, 3, 64, 96)
    found = model.influences(x, (0.3, 0.6))
    assert list(found)[0] == 'stages.0.blocks.0' and len(found) == 5 and model.training
    first = found['stages.0.blocks.0']
    assert first.place == (4, 14) and first.weights.shape == (2, 2, 16, 24) and first.edges[1].shape == (2, 2, 8, 12)
    assert_close(first.weights.sum((2, 3)), torch.ones(2, 2))
    assert_close(first.shares.sum(1), torch.ones(2))
    # The mixer multiplies its values by this row of the inverse.
    mixer, tokens = TreeMixer(4, 2), torch.randn(1, 5, 6, 4)
    edges = mixer.edges(tokens, mixer.levels(5, 6))
    weights = mixer.influence(tokens, 2, 3, edges)
    values = mixer.value(tokens).unflatten(3, (2, 2))
    solved = torch.einsum('bhyx,byxhd->bhd', weights, values).flatten(1)
    expected = mixer.out(torch.nn.functional.silu(mixer.gate(tokens[:, 2, 3])) * solved)
    assert_close(mixer(tokens)[:, 2, 3], expected)
    for at in ((0.5, 1.0), (0.5,), 'ab'):
        with pytest.raises(ValueError, match='fractions of height and width'):
            model.influences(x, at)
    with torch.inference_mode():
        assert model.influences(x)['stages.0.blocks.0'].weights.isfinite().all()


# --- sequences

def test_grid_orders():
    assert grid_order(2, 3, 'raster').tolist() == [0, 1, 2, 3, 4, 5]
    assert grid_order(2, 3, 'snake').tolist() == [0, 1, 2, 5, 4, 3]
    assert grid_order(4, 4, 'morton')[:8].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    for order in ('raster', 'snake', 'morton'):
        assert grid_order(5, 7, order).sort().values.tolist() == list(range(35))


@pytest.mark.parametrize('options', [
    dict(), dict(mixer='scan'), dict(block_size=2), dict(parametrization='symmetric', arity=2),
    dict(parametrization='skew', block_size=4, num_heads=2), dict(static_edges=True, virtual_input='embed'),
    dict(virtual_input='zero', readout='mean', readout_levels=3), dict(order='snake', mlp_ratio=1.0)],
                         ids=str)
def test_sequence_network_trains(options):
    torch.manual_seed(0)
    model = timm.create_model('myo_sequence', dim=32, depth=2, in_chans=1, num_classes=5, **options)
    for x in (torch.randn(3, 1, 9, 7), torch.randn(3, 50, 1)):
        y = model(x)
        assert y.shape == (3, 5) and y.isfinite().all()
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.reset_classifier(0)
    assert model(x).shape == (3, model.num_features)
    with torch.autocast('cpu', torch.bfloat16):
        assert model(x).isfinite().all()


@pytest.mark.parametrize('order', ['morton', 'snake', 'raster'])
@pytest.mark.parametrize('mixer', ['tree', 'scan'])
def test_images_are_read_in_the_given_order(order, mixer):
    torch.manual_seed(0)
    model = timm.create_model('myo_sequence', order=order, mixer=mixer, dim=16, depth=1).eval()
    x = torch.randn(2, 3, 4, 4)
    sequence = x.flatten(2)[:, :, grid_order(4, 4, order)].transpose(1, 2)
    assert_close(model(x), model(sequence))
    assert (model(x) - model(x.flatten(2).transpose(1, 2))).abs().max() > 1e-4 or order == 'raster'


def test_means_over_the_leaves_of_nodes():
    mask = torch.arange(9)[None] < torch.tensor([[9], [5]])
    nodes = Nodes(9, 2, 1, mask, 'cpu')
    assert nodes.lengths == [9, 5, 3, 2, 1] and len(nodes.tree) == 20
    u = nodes.means(torch.arange(9.0).expand(2, 9)[..., None])
    assert u[0, 9:, 0].tolist() == [0.5, 2.5, 4.5, 6.5, 8, 1.5, 5.5, 8, 3.5, 8, 4]
    assert u[1, 9:, 0].tolist() == [0.5, 2.5, 4, 0, 0, 1.5, 4, 0, 2, 0, 2]
    tops = nodes.top_means(torch.arange(20.0).expand(2, 20)[..., None], 2)
    assert [top[:, 0].tolist() for top in tops] == [[19, 19], [17.5, 17]]         # the second node is padding


def test_absent_nodes_have_no_effect_and_edges_grow():
    torch.manual_seed(0)
    mixer = TreeSequenceMixer(8, 2, 2, 1, 'laplacian', static_edges=False)
    nodes = Nodes(9, 2, 1, torch.arange(9)[None] < 5, 'cpu')
    x, present = torch.randn(1, 20, 8), nodes.present[0]
    other = torch.where(present[:, None], x, 100.0)
    assert_close(mixer(other, nodes)[0, present], mixer(x, nodes)[0, present])
    static = TreeSequenceMixer(8, 2, 2, 1, 'laplacian', static_edges=True)
    torch.nn.init.zeros_(static.edge_bias)
    z = static.edges(x, Nodes(9, 2, 1, None, 'cpu'))[0, 0, :, 0, 0]
    assert_close(z, math.log(2) * 2.0 ** nodes.level)


@pytest.mark.parametrize('options', [dict(), dict(mixer='scan'), dict(parametrization='laplacian')], ids=str)
def test_half_precision_and_gradient_checkpointing(options):
    torch.manual_seed(0)
    model = timm.create_model('myo_sequence', dim=16, depth=2, **options)
    x = torch.randn(2, 3, 5, 5)
    for dtype in (torch.bfloat16, torch.float16):
        y = copy.deepcopy(model).to(dtype)(x.to(dtype))
        assert y.dtype == dtype and y.isfinite().all()
    expected = model(x)
    model.set_grad_checkpointing()
    assert_close(model(x), expected)
    model(x).sum().backward()
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    assert {group['lr_scale'] for group in groups} >= {1.0, 0.5}


@pytest.mark.parametrize('mixer', ['tree', 'scan'])
def test_padding_tokens_have_no_effect(mixer):
    torch.manual_seed(0)
    model = timm.create_model('myo_sequence', vocab_size=18, dim=16, depth=2, mixer=mixer, arity=2).eval()
    tokens = torch.randint(1, 18, (2, 40))
    tokens[0, 25:] = 0
    alone = model(tokens[:1])
    assert (model(tokens)[0] - alone[0]).abs().max() < 1e-5
    with torch.no_grad():
        model.encoder.weight[0] += 10
    assert (model(tokens)[0] - alone[0]).abs().max() < 1e-5        # the encoding of padding has no effect


@pytest.mark.parametrize('mixer', ['tree', 'scan'])
def test_trace_and_export_after_a_first_call(mixer):
    model = timm.create_model('myo_sequence', dim=16, depth=1, mixer=mixer).eval()
    x, y = torch.randn(2, 3, 6, 5), torch.randn(2, 3, 6, 5)
    expected = model(y)
    traced = torch.jit.trace(model, x)
    assert_close(traced(y), expected)
    assert_close(torch.export.export(model, (x,)).module()(y), expected)
    with pytest.raises((RuntimeError, IndexError)):
        traced(torch.randn(2, 3, 5, 5))


def test_myo_sequence_rejects_wrong_options_and_inputs():
    for options, message in ((dict(order='hilbert'), "order must be one of 'morton', 'snake', 'raster'"),
                             (dict(arity=1), 'arity must be'), (dict(dim=30), 'multiple of num_heads'),
                             (dict(mixer='attention'), "mixer must be one of 'tree', 'scan'"),
                             (dict(num_heads=0), 'num_heads must be'), (dict(features_only=True), 'no feature maps'),
                             (dict(mlp_ratio=-1), 'mlp_ratio must be a number'),
                             (dict(vocab_size=0), 'vocab_size must be')):
        with pytest.raises(ValueError, match=message):
            timm.create_model('myo_sequence', **options)
    with pytest.raises(ValueError, match=r'images \(B, 3, H, W\) or sequences'):
        timm.create_model('myo_sequence')(torch.randn(2, 4, 8, 8))
    with pytest.raises(ValueError, match='integer tokens'):
        timm.create_model('myo_sequence', vocab_size=5)(torch.randn(2, 4))


def test_scan_mixer_equals_the_recurrence():
    torch.manual_seed(0)
    frequencies = hippo_normal_eigenvalues(32)
    assert frequencies.imag[0] == pytest.approx(0.26, abs=0.01) and frequencies.imag[-1] == pytest.approx(1303, abs=1)
    mixer, x = ScanMixer(4, 3), torch.randn(2, 11, 4)
    step, eigenvalues = mixer.log_step.exp(), torch.complex(-mixer.log_rate.exp(), mixer.frequency)
    decay = (step * eigenvalues).exp()
    inputs = torch.complex(*mixer.input(x).chunk(2, -1)) * (decay - 1) / eigenvalues

    def scan(inputs):
        state, states = torch.zeros(2, 3, dtype=torch.complex64), []
        for k in range(inputs.shape[1]):
            state = decay * state + inputs[:, k]
            states.append(state)
        return torch.stack(states, 1)

    both = [scan(inputs), scan(inputs.flip(1)).flip(1)]
    expected = 2 * mixer.output(torch.cat([part for s in both for part in (s.real, -s.imag)], -1))
    assert_close(mixer(x), expected)
