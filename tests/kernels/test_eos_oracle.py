"""The recurrences against the operators of fla-core (flash-linear-attention), run in the interpreter of Triton."""
import pytest
import torch
import torch.nn.functional as F
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
