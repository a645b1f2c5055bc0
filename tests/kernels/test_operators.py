"""Every operator with step logs against its reference: values, gradients, odd shapes, dtypes, strides, extremes."""
import importlib
from functools import partial

import pytest
import torch
from helpers import assert_close
from operator_cases import CALLS, TOLERANCE, attention_inputs, run, weighted_sum
from pairwise import pairwise

from subquad import kernels
from subquad.kernels.dispatch import OPERATORS

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
GRIDS = [(4, 6), (7, 3), (1, 9), (5, 1), (1, 1)]


def _run(call, inputs, backend):
    """Output and gradients; zeros for an input that has no gradient."""
    y, grads = run(call, inputs, backend)
    return y, [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads)]


@pairwise('backend, name, grid', ['portable', 'export'], CALLS, GRIDS)
def test_values_and_gradients(name, grid, backend):
    inputs = attention_inputs(*grid)
    y, grads = _run(CALLS[name], inputs, 'reference')
    y2, grads2 = _run(CALLS[name], inputs, backend)
    assert_close(y2, y, 1e-12)
    for actual, expected in zip(grads2, grads):
        assert (actual - expected).abs().max() <= 1e-11 * max(1, expected.abs().max())


@pairwise('backend, name, dtype', ['portable', 'export', 'reference'], CALLS, DTYPES[1:])
def test_dtypes(name, dtype, backend):
    inputs = attention_inputs(5, 6, dtype)
    expected, grads = _run(CALLS[name], [x.double() for x in inputs], 'reference')
    y, grads2 = _run(CALLS[name], inputs, backend)
    assert y.dtype == dtype
    assert_close(y, expected, TOLERANCE[dtype])
    for actual, wanted in zip(grads2, grads):
        assert (actual.double() - wanted).abs().max() <= 2 * TOLERANCE[dtype] * max(1, wanted.abs().max())


@pytest.mark.parametrize('name', ['polyline-additive-both', 'polyline-multiplicative-both', 'decay-additive-column',
                                  'decay-multiplicative-row', 'crisscross-additive-both'])
def test_many_blocks_equal_one(name, monkeypatch):
    """Blocked loops over groups, lines and queries give the same result with the smallest blocks."""
    inputs = attention_inputs(5, 7)
    y, grads = _run(CALLS[name], inputs, 'reference')
    for elements in (1, 20, 100, 600):
        for module in ('polyline_attention', 'decay_attention'):
            portable = importlib.import_module(f'subquad.kernels.{module}.portable')
            monkeypatch.setattr(portable, 'BLOCK_ELEMENTS', elements)
        y2, grads2 = _run(CALLS[name], inputs, 'portable')
        assert_close(y2, y, 1e-12)
        for actual, expected in zip(grads2, grads):
            assert (actual - expected).abs().max() <= 1e-11 * max(1, expected.abs().max())


@pytest.mark.parametrize('name', CALLS)
@pytest.mark.parametrize('backend', ['reference', 'portable', 'export'])
def test_step_logs_of_zero_have_the_gradient_from_below(name, backend):
    """An absolute value of a difference of equal sums has none, and a decay of exactly 0 could not be learned."""
    call, step = CALLS[name], 1e-6
    q, k, v, *logs = (x[:1, :2].clone() for x in attention_inputs(2, 3))
    logs = [log.zero_() for log in logs]
    y, grads = _run(call, [q, k, v, *logs], backend)
    for log, grad in zip(logs, grads[3:]):
        expected = torch.empty_like(log)
        for index in range(log.numel()):
            log.view(-1)[index] = -step
            expected.view(-1)[index] = (weighted_sum(y) - weighted_sum(call(q, k, v, *logs, backend))) / step
            log.zero_()
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
        assert expected.abs().max() > 0.05 or name.startswith('decay') and log is logs[1]


@pytest.mark.parametrize('name', ['polyline-additive-both', 'crisscross-multiplicative-both', 'scan-both'])
def test_recorded_graphs_have_the_absolute_value(name):
    """Runtimes and quantizers know it; the signs of `log_decay` would be more operators, and a product to quantize."""
    class Call(torch.nn.Module):
        def forward(self, *inputs):
            return CALLS[name](*inputs, 'export')

    inputs = tuple(attention_inputs(3, 4, torch.float32))
    program = torch.export.export(Call(), inputs).run_decompositions()
    targets = {str(node.target) for node in program.graph.nodes}
    assert 'aten.abs.default' in targets and not targets & {'aten.sign.default', 'aten.arange.start_step'}
    torch.testing.assert_close(program.module()(*inputs), CALLS[name](*inputs, 'export'))


@pytest.mark.parametrize('paths', ['v2h', 'both'])
@pytest.mark.parametrize('shape', [(70, 3), (3, 131), (2, 3, 66)], ids=['columns', 'rows', 'three-dimensions'])
def test_gradients_of_scans_where_some_steps_are_zero(shape, paths):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, *shape, 3, dtype=torch.float64, generator=g)
    logs = [-0.5 * torch.rand(1, 2, *shape, dtype=torch.float64, generator=g) for _ in shape]
    logs = [log * (torch.rand(log.shape, generator=g) < 0.3) for log in logs]

    def call(x, *arguments):
        return kernels.polyline_scan(x, *arguments[:-1], paths=paths, backend=arguments[-1])
    _, expected = _run(call, (x, *logs), 'reference')
    for backend in ('portable', 'export'):
        for grad, wanted in zip(_run(call, (x, *logs), backend)[1], expected):
            assert_close(grad, wanted, 1e-10)
    downwards = [-torch.rand(log.shape, dtype=torch.float64, generator=g) for log in logs]
    lower = [log + 1e-7 * direction for log, direction in zip(logs, downwards)]
    change = weighted_sum(call(x, *lower, 'portable')) - weighted_sum(call(x, *logs, 'portable'))
    slope = sum((grad * direction).sum() for grad, direction in zip(expected[1:], downwards))
    torch.testing.assert_close(slope, change / 1e-7, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('length', [63, 64, 65, 96, 131])
@pytest.mark.parametrize('paths', ['v2h', 'h2v', 'both'])
def test_scan_over_several_chunks(length, paths):
    g = torch.Generator().manual_seed(length)
    x = torch.randn(1, 2, length, 3, 4, dtype=torch.float64, generator=g)
    a, b = (-torch.rand(1, 2, length, 3, dtype=torch.float64, generator=g) * 0.2 for _ in range(2))
    for tensors in ((x, a, b), (x.transpose(2, 3), a.transpose(2, 3), b.transpose(2, 3))):
        def call(x, a, b, backend):
            return kernels.polyline_scan(x, a, b, paths=paths, backend=backend)
        y, grads = _run(call, tensors, 'reference')
        y2, grads2 = _run(call, tensors, 'portable')
        assert_close(y2, y, 1e-12)
        for actual, expected in zip(grads2, grads):
            assert (actual - expected).abs().max() <= 1e-10 * max(1, expected.abs().max())


def test_linear_attention_in_slices_of_the_state(monkeypatch):
    from subquad.kernels.polyline_linear_attention import portable
    inputs = attention_inputs(4, 5)
    whole = kernels.polyline_linear_attention(*inputs)
    monkeypatch.setattr(portable, 'STATE_ELEMENTS', 3 * inputs[2].numel())
    torch.testing.assert_close(kernels.polyline_linear_attention(*inputs), whole)


@pytest.mark.parametrize('backend', ['portable', 'export'])
@pytest.mark.parametrize('name', ['polyline-additive-both', 'polyline-multiplicative-both', 'crisscross-additive-both',
                                  'decay-additive-row', 'scan-both', 'linear-both'])
def test_extreme_steps(name, backend):
    """Step logs of 0, tiny, large and -inf together give finite results equal to the reference."""
    inputs = attention_inputs(4, 7, torch.float32)
    values = torch.tensor([0.0, -1e-6, -80.0, -float('inf'), -0.5])
    g = torch.Generator().manual_seed(0)
    for n in (3, 4):
        inputs[n] = values[torch.randint(0, 5, inputs[n].shape, generator=g)]
    expected, _ = _run(CALLS[name], [x.double() for x in inputs], 'reference')
    y, grads = _run(CALLS[name], inputs, backend)
    assert_close(y, expected, 1e-5)
    assert all(g.isfinite().all() for g in grads)


def test_peaked_logits_far_from_a_decayed_maximum():
    """The largest logit belongs to a key that the mask removes: the softmax must not underflow to 0 / 0."""
    q, k, v, a, b = attention_inputs(3, 4, torch.float32)
    k[..., -1, -1, :] = 300 * q[..., 0, 0, :]
    a, b = torch.full_like(a, -60.0), torch.full_like(b, -60.0)
    y = kernels.polyline_attention(q, k, v, a, b)
    expected = kernels.polyline_attention(*(x.double() for x in (q, k, v, a, b)), backend='reference')
    assert_close(y, expected, 1e-4)


@pytest.mark.parametrize('name', CALLS)
def test_strided_views(name):
    dense = attention_inputs(4, 5)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense[:3]]
    views += [x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1) for x in dense[3:]]
    torch.testing.assert_close(CALLS[name](*views, 'portable'), CALLS[name](*dense, 'portable'))


def test_gradcheck():
    q, k, v, a, b = (x[:1, :2, :3, :3].clone().requires_grad_() for x in attention_inputs(3, 3))
    for call in CALLS.values():
        assert torch.autograd.gradcheck(partial(call, backend='portable'), (q, k, v, a, b), atol=1e-6, fast_mode=True)


def test_wrong_arguments_are_refused():
    q, k, v, a, b = attention_inputs(4, 5, torch.float32)
    cases = [
        (ValueError, "mask_mode must be one of 'additive', 'multiplicative', got 'logits'",
         lambda: kernels.polyline_attention(q, k, v, a, b, mask_mode='logits')),
        (ValueError, 'paths must be one of', lambda: kernels.polyline_attention(q, k, v, a, b, paths='2d')),
        (ValueError, r'k must have shape \(2, 3, 4, 5, 8\).*got \(2, 3, 4, 4, 8\)',
         lambda: kernels.polyline_attention(q, k[:, :, :, :4], v, a, b)),
        (ValueError, r'log_beta must have shape \(2, 3, 4, 5\)',
         lambda: kernels.crisscross_attention(q, k, v, a, b[:1])),
        (ValueError, 'log_decay must have 4 dimensions', lambda: kernels.decay_attention(q, k, v, q)),
        (ValueError, 'axis must be one of', lambda: kernels.decay_attention(q, k, v, a, axis='w')),
        (TypeError, 'must share a dtype', lambda: kernels.polyline_attention(q.double(), k, v, a, b)),
        (ValueError, 'unknown backend', lambda: kernels.polyline_attention(q, k, v, a, b, backend='cuda')),
        (ValueError, 'paths must be one of', lambda: kernels.polyline_scan(v, a, b, paths='hv')),
        (ValueError, 'x must have 6 dimensions', lambda: kernels.polyline_scan(v, a, b, a)),
        (ValueError, 'log_alpha is on meta', lambda: kernels.polyline_scan(v, a.to('meta'), b)),
        (ValueError, 'unknown operator', lambda: kernels.why_not('attention')),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def test_use_backend_overrides_auto_only(monkeypatch):
    calls = []
    monkeypatch.setitem(OPERATORS['polyline_scan'].implementations, 'reference', lambda *args: calls.append(args))
    v, a, b = attention_inputs(2, 2)[2:]
    with kernels.use_backend('reference'):
        kernels.polyline_scan(v, a, b)
        assert len(calls) == 1
        kernels.polyline_scan(v, a, b, backend='portable')
    kernels.polyline_scan(v, a, b)
    assert len(calls) == 1
    with pytest.raises(ValueError, match='unknown backend'), kernels.use_backend('fast'):
        pass
