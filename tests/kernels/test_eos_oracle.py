"""The recurrences against the operators of fla-core (flash-linear-attention), and `backend='fla'`, which runs them, in
the interpreter of Triton."""
import pytest
import torch
import torch.nn.functional as F
from eos_cases import call, inputs, parts, values_and_gradients
from helpers import assert_close

from subquad.kernels import eos_elementwise, eos_matmul
from subquad.kernels.common import launch

pytest.importorskip('triton')
pytest.importorskip('fla.ops', reason='fla-core is not installed (pip install fla-core)')
if not launch.interpreted():
    pytest.skip('the comparison runs in the interpreter, and Triton was imported without TRITON_INTERPRET=1',
                allow_module_level=True)

B, T, H, K = 1, 32, 2, 16


@pytest.fixture(autouse=True)
def first_configuration(monkeypatch):
    """The autotuner times kernels on a GPU: take the first of its configurations instead."""
    from triton.runtime.autotuner import Autotuner

    def run(self, *args, **options):
        return self.fn.run(*args, **{**self.configs[0].all_kwargs(), **options})
    monkeypatch.setattr(Autotuner, 'run', run)


def _inputs(count):
    """Return leaves (B, T, H, K), the layout of fla-core."""
    return [torch.randn(B, T, H, K, requires_grad=True) for _ in range(count)]


def _check(theirs, ours, leaves, tolerance=1e-5):
    weight = torch.randn(B, T, H, K)
    found = [[y, *torch.autograd.grad((y * weight).sum(), leaves, retain_graph=True)] for y in (ours, theirs)]
    for actual, expected in zip(*found):
        assert_close(actual, expected, tolerance)


def _heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def test_linear_attention():
    from fla.ops.linear_attn import fused_recurrent_linear_attn
    q, k, v = leaves = _inputs(3)
    theirs, _ = fused_recurrent_linear_attn(q, k, v, scale=1.0, normalize=False)
    query, key, value = _heads_first(q, k, v)
    _check(theirs, eos_elementwise(value, key, query).transpose(1, 2), leaves)


@pytest.mark.parametrize('reverse', [False, True])
def test_gates_of_keys_and_values(reverse):
    from fla.ops.gla import fused_recurrent_gla
    q, k, v, gk, gv = leaves = _inputs(5)
    gk, gv = F.logsigmoid(gk), F.logsigmoid(gv)
    theirs, _ = fused_recurrent_gla(q, k, v, gk=gk, gv=gv, scale=1.0, reverse=reverse)
    query, key, value, log_k, log_d = _heads_first(q, k, v, gk, gv)
    ours = eos_elementwise(value, key, query, log_o_k=log_k, log_o_d=log_d, reverse=reverse)
    _check(theirs, ours.transpose(1, 2), leaves)


def test_hgrn():
    from fla.ops.hgrn import fused_recurrent_hgrn
    x, g = (torch.randn(B, T, K, requires_grad=True) for _ in range(2))
    log = F.logsigmoid(g)
    theirs, _ = fused_recurrent_hgrn(x, log)
    ones = torch.ones(B, 1, T, 1)
    ours = eos_elementwise(x[:, None], ones, ones, log_o_d=log[:, None])[:, 0]
    _check(theirs[:, :, None].expand(-1, -1, H, -1), ours[:, :, None].expand(-1, -1, H, -1), [x, g])


def test_delta_rule():
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    q, k, v, rate = leaves = _inputs(4)
    k, beta = F.normalize(k, dim=-1), rate[..., 0].sigmoid()
    theirs, _ = fused_recurrent_delta_rule(q, k, v, beta, scale=1.0)
    query, key, value = _heads_first(q, k, v)
    scaled = key * beta.mT.unsqueeze(-1)
    _check(theirs, eos_matmul(value, scaled, query, a=key, b=-scaled).transpose(1, 2), leaves)


def test_iplr_delta_rule():
    """Their kernel rounds more: 9e-5 was measured against a float64 loop."""
    from fla.ops.generalized_delta_rule import fused_recurrent_iplr_delta_rule
    q, k, v, a = leaves = _inputs(4)
    k, a = F.normalize(k, dim=-1), F.normalize(a, dim=-1)
    theirs, _ = fused_recurrent_iplr_delta_rule(q, k, v, a, -k, scale=1.0)
    query, key, value, free = _heads_first(q, k, v, a)
    _check(theirs, eos_matmul(value, key, query, a=free, b=-key).transpose(1, 2), leaves, 2e-4)


# --- backend='fla'

ROWS = ['ones', 'k', 'd', 'kd', 'scalar', 'constant', 'constant scalar', 'scalar and d', 'constant theta', 'delta']


@pytest.mark.parametrize('direction', ['forward', 'both'])
@pytest.mark.parametrize('name', ROWS)
def test_backend_equals_the_reference(name, direction):
    tensors = inputs(name, 9, 4, 5, 1, 2, torch.float32)
    expected, expected_grads = values_and_gradients(name, [x.double() for x in tensors], 'reference', direction)
    outputs, grads = values_and_gradients(name, tensors, 'fla', direction)
    tolerance = 2e-4 if name == 'delta' else 1e-5
    for actual, wanted in zip([*outputs, *grads], [*expected, *expected_grads]):
        assert_close(actual, wanted, tolerance)


@pytest.mark.parametrize('name', ['ones', 'kd', 'scalar', 'delta', 'delta k', 'delta constant'])
def test_backend_with_memories_at_both_ends(name):
    tensors, state = inputs(name, 9, 4, 5, 2, 2, torch.float32), torch.randn(2, 2, 4, 5)
    for direction in ('forward', 'reverse'):
        run = dict(direction=direction, output_state=True, scale=0.5)
        expected = parts(call(name, [x.double() for x in tensors], 'reference', initial_state=state.double(), **run))
        for actual, wanted in zip(parts(call(name, tensors, 'fla', initial_state=state, **run)), expected):
            assert_close(actual, wanted, 2e-4 if 'delta' in name else 1e-5)


def test_backend_in_half_types():
    tensors = inputs('k', 9, 4, 5, 1, 2, torch.bfloat16, 0.2)
    y = call('k', tensors, 'fla', 'both')
    assert y.dtype == torch.bfloat16
    assert_close(y, call('k', [x.double() for x in tensors], 'reference', 'both'), 3e-2)


@pytest.mark.parametrize('name, options, message', [
    ('delta k', {}, 'fused_recurrent_dplr_delta_rule has no backward pass'),
    ('k', dict(output_state=True), 'the memory at an end of the line has no gradient there'),
    ('delta', dict(initial_state=torch.zeros(1, 2, 4, 5)), 'the memory at an end of the line has no gradient there'),
])
def test_backend_refuses_gradients_that_it_lacks(name, options, message):
    tensors = [x.requires_grad_() for x in inputs(name, 9, 4, 5, 1, 2, torch.float32)]
    with pytest.raises(ValueError, match=message):
        call(name, tensors, 'fla', **options)
