"""Test the decays of LCSM's memories against the arguments of the operator, and memory lengths against loops."""
import pytest
import timm
import torch
from helpers import assert_close

from subquad.backbones.mixers import EosMixer, eos_linear, eos_systems
from subquad.backbones.mixers.eos_codes import PRESETS, WITHOUT_KEYS
from subquad.backbones.mixers.eos_decay import memory_lengths
from subquad.backbones.timm_interface import init_linear
from subquad.kernels.eos_scan.generator import generated_logs
from subquad.kernels.eos_scan.problem import per_token

WITHOUT_DECAY = {
    'linear_attention': 'absolute value 1', 'cosformer': 'absolute value 1', 'lrpe': 'absolute value 1',
    '1-10-1-0': 'absolute value 1', '1-11-1-0': 'absolute value 1', '1-12-1-0': 'depends on all tokens',
    'deltanet': 'is a matrix', 'fwp': 'is a matrix', 'm1': 'is a matrix', 'm2': 'is a matrix'}
WITH_DECAY = [name for name in (*PRESETS, *(f'1-{o}-1-0' for o in range(10)), '0-0-0-0') if name not in WITHOUT_DECAY]
CONSTANT = ('s4', 's4d', 's5', 'dss', 'tnn', 'retnet', 'tnl', 'rwkv4', '1-0-1-0', '1-4-1-0', '1-5-1-0', '0-0-0-0')


def mixer(name, **options):
    torch.manual_seed(0)
    made = EosMixer(32, 2, name, expand_dim=None if name in WITHOUT_KEYS else 4, dtype=torch.float64, **options)
    return made.apply(init_linear).eval()


LOGS = ('log_o_k', 'log_o_d', 'log_o', 'generator')


def step_logs(i, e, log_o_k=None, log_o_d=None, log_o=None, generator=None):
    """Return log |o| as the operator reads its arguments: (B, H, T, K, D)."""
    keys = e.shape[1 if e.ndim == 3 else 3]
    total = torch.zeros(*i.shape[:3], keys, i.shape[3], dtype=torch.float64)
    if log_o_k is not None:
        total = total + per_token(log_o_k).unsqueeze(-1)
    if log_o_d is not None:
        total = total + per_token(log_o_d).unsqueeze(-2)
    if log_o is not None:
        total = total + log_o[None, :, None]
    if generator is not None:
        z, weight, axis, form, tau = generator
        total = total + generated_logs(z.unsqueeze(-1 if axis == 'k' else -2), weight[:, None], form, tau)
    return total


@pytest.mark.parametrize('name', WITH_DECAY)
def test_decays_are_those_of_the_operator(name, monkeypatch):
    """The mean of log |o| over the memory of each head, and over tokens for each element."""
    made, x, seen = mixer(name, mode='raster'), torch.randn(2, 3, 4, 32, dtype=torch.float64), []
    for module in (eos_linear, eos_systems):
        def keep(i, e, s, run=module.eos_elementwise, **options):
            seen.append(step_logs(i, e, **{name: x for name, x in options.items() if name in LOGS}))
            return run(i, e, s, **options)
        monkeypatch.setattr(module, 'eos_elementwise', keep)
    made(x)
    found, logs = made.state_decay(x), seen[0]
    assert all(torch.equal(logs, other) for other in seen)   # RWKV-4 runs in each direction by itself
    heads = 1 if name == 's5' else 2                         # S5 has one memory for all heads
    logs = logs.unflatten(1, (heads, -1))
    assert found.logs.shape == ((1, heads, 1, 1) if name in CONSTANT else (2, 2, 3, 4))
    assert_close(found.logs.expand(2, heads, 3, 4), logs.mean((2, 4, 5)).unflatten(2, (3, 4)), 1e-12)
    elements = logs.mean((0, 3)).flatten(1)
    ends = [torch.stack([x.amin(1), x.mean(1), x.amax(1)]) for x in (found.elements, elements)]
    assert_close(*ends, 1e-12)
    assert found.logs.max() < 0


@pytest.mark.parametrize('name', WITHOUT_DECAY)
def test_recurrences_without_decays_say_why(name):
    with pytest.raises(ValueError, match=f"mixer='{name}' has no decay for each token: .*{WITHOUT_DECAY[name]}"):
        mixer(name).state_decay(torch.randn(1, 3, 4, 32, dtype=torch.float64))


def expected_length(rates, start):
    """Go on from a token until the sum of rates reaches 1, and behind the last token at their mean."""
    total, place = 0.0, start
    while True:
        rate = rates[place + 1] if place + 1 < len(rates) else sum(rates) / len(rates)
        if total + rate >= 1:
            return place - start + (1 - total) / rate
        total, place = total + rate, place + 1


@pytest.mark.parametrize('scale', [0.02, 0.3, 3.0])
def test_memory_lengths(scale):
    rates = scale * torch.rand(2, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rates[0, 0, 4:7] = 0.0                                   # tokens that forget nothing
    for dim in (1, 2):
        for reverse in (False, True):
            found = memory_lengths(-rates, dim, reverse).movedim(dim, -1).flatten(0, 1)
            lines = rates.movedim(dim, -1).flatten(0, 1)
            if reverse:
                found, lines = found.flip(1), lines.flip(1)
            expected = torch.tensor([[expected_length(line, n) for n in range(len(line))] for line in lines.tolist()])
            assert_close(found, expected.double(), 1e-4)
        both = (memory_lengths(-rates, dim, False) + memory_lengths(-rates, dim, True)) / 2
        assert torch.equal(memory_lengths(-rates, dim), both)


def test_constant_decays_have_one_length():
    assert_close(memory_lengths(torch.full((3, 7), -0.04), 1), torch.full((3, 7), 25.0).double(), 1e-6)
    assert memory_lengths(torch.zeros(1, 7), 1).unique().tolist() == [pytest.approx(1e6)]


def test_state_decays_of_a_network():
    model = timm.create_model('test_lcsm', mixer='1-6-1-0').train()
    found = model.state_decays(torch.randn(2, 3, 64, 96))
    assert [tuple(decay.logs.shape) for decay in found.values()] == [
        (2, 1, 16, 24), (2, 3, 8, 12), (2, 2, 4, 6), (2, 2, 4, 6), (2, 3, 2, 3)]
    assert list(found) == list(model.mixers()) and model.training
    assert not any(decay.logs.requires_grad for decay in found.values())
