"""Calls of the operators, inputs for them, and their outputs and gradients, for the kernel tests."""
from functools import partial

import pytest
import torch
from torch import Tensor

from subquad import kernels
from subquad.kernels.common import launch
from subquad.kernels.trees import Tree

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
# Relative to float64; a GPU multiplies half types in half precision.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MASK_MODES = ('additive', 'multiplicative')
PATHS = ('both', 'v2h', 'h2v')


def _calls():
    for mask_mode in MASK_MODES:
        for paths in PATHS:
            yield f'polyline-{mask_mode}-{paths}', lambda q, k, v, a, b, backend, mask_mode=mask_mode, paths=paths: (
                kernels.polyline_attention(q, k, v, a, b, mask_mode=mask_mode, paths=paths, backend=backend))
            yield f'crisscross-{mask_mode}-{paths}', lambda q, k, v, a, b, backend, mask_mode=mask_mode, paths=paths: (
                kernels.crisscross_attention(q, k, v, a, b, mask_mode=mask_mode, paths=paths, backend=backend))
        for axis in ('row', 'column'):
            yield f'decay-{mask_mode}-{axis}', lambda q, k, v, a, b, backend, mask_mode=mask_mode, axis=axis: (
                kernels.decay_attention(q, k, v, a, axis=axis, mask_mode=mask_mode, backend=backend))
    for paths in PATHS:
        yield f'scan-{paths}', lambda q, k, v, a, b, backend, paths=paths: (
            kernels.polyline_scan(v, a, b, paths=paths, backend=backend))
        yield f'linear-{paths}', lambda q, k, v, a, b, backend, paths=paths: (
            kernels.polyline_linear_attention(q, k, v, a, b, paths=paths, backend=backend))


# Name -> call(q, k, v, a, b, backend).
CALLS = dict(_calls())


def _normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _steps(*shape):
    return -0.1 - 0.5 * torch.rand(*shape, dtype=torch.float64)


def _attention(batch, logs=2):
    return [*(_normal(batch, 2, 3, 4, 2) for _ in range(3)),
            *(_steps(batch, 2, 3, 4) for _ in range(logs))]


def _lines(batch, channels):
    return [_normal(batch, 2, 6, channels), *(_normal(batch, 2, 6, 2) for _ in range(2))]


def _solve(*args, **options):
    return torch.cat([x.flatten() for x in kernels.quadtree_solve(args[:3], args[3:], **options)])


def _rotary(q, k, **options):
    angles = torch.linspace(0, 3, 6, dtype=q.dtype, device=q.device)[:, None]
    table = torch.stack([angles.cos(), angles.sin()], -1)
    return torch.cat(kernels.rotary_embedding(q, k, table, **options))


def _eos(name):
    return lambda i, e, s, log, **options: kernels.eos_elementwise(i, e, s, **{name: log}, **options)


LEVELS = [(3, 4), (2, 2), (1, 1)]
# An operator (of which form): its function, and what makes its arguments for a batch.
CASES = {
    'polyline_attention': (kernels.polyline_attention, _attention),
    'crisscross_attention': (kernels.crisscross_attention, _attention),
    'decay_attention': (partial(kernels.decay_attention, axis='row'), partial(_attention, logs=1)),
    'polyline_scan': (kernels.polyline_scan, lambda batch: _attention(batch)[2:]),
    'polyline_linear_attention': (kernels.polyline_linear_attention, _attention),
    'separable_attention': (partial(kernels.separable_attention, patch_size=2),
                            lambda batch: [_normal(batch, 3, 4, channels) for channels in (1, 2, 2)]),
    'quadtree_attention': (kernels.quadtree_attention,
                           lambda batch: [*_attention(batch, 0), _normal(2, 2, 2, 2)]),
    'quadtree_solve': (partial(_solve, parametrization='skew'), lambda batch: [
        *(_normal(batch, 2, *level, 2) for level in LEVELS),
        *(_normal(batch, 2, *level) for level in LEVELS[:2])]),
    'tree_solve': (partial(kernels.tree_solve, Tree([2, 2, -1], 2)), lambda batch: [
        _normal(batch, 3, 2, 2) + 4 * torch.eye(2), *(_normal(batch, 3, 2, n) for n in (2, 2, 3))]),
    'rotary_embedding': (_rotary, lambda batch: [_normal(batch, 2, 6, 2) for _ in range(2)]),
    'depthwise_conv': (kernels.depthwise_conv, lambda batch: [
        _normal(batch, 3, 4, 2), _normal(2, 1, 3, 3), _normal(2), _normal(batch, 3, 4, 2)]),
    'eos_elementwise': (_eos('log_o_k'), lambda batch: [*_lines(batch, 3), _steps(batch, 2, 6, 2)]),
    'eos_elementwise-full': (_eos('log_o'), lambda batch: [*_lines(batch, 3), _steps(2, 2, 3)]),
    'eos_elementwise-small': (_eos('log_o_k'), lambda batch: [
        *_lines(64 * batch, 1), _steps(64 * batch, 2, 6, 2)]),
    'selective_scan': (partial(kernels.selective_scan, paths=('right', 'up')), lambda batch: [
        _normal(batch, 3, 4, 2), _normal(batch, 3, 4, 2, 2), -torch.rand(2, 2, 3, dtype=torch.float64),
        *(_normal(batch, 3, 4, 2, 3) for _ in range(2)), *(_normal(2, 2) for _ in range(2))]),
    'eos_matmul': (lambda i, e, s, a, b, **options: kernels.eos_matmul(i, e, s, a=a, b=b, **options),
                   lambda batch: [*_lines(batch, 3), *(0.3 * _normal(batch, 2, 6, 2) for _ in range(2))]),
}


def attention_inputs(height, width, dtype=torch.float64, batch=2, heads=3, dim=8, dim_v=5, key_scale=1.0,
                     drawn=torch.float64, device='cpu'):
    """Return q, k, v and two step logs for a grid; numbers are drawn in `drawn`, then cast to `dtype`."""
    g = torch.Generator().manual_seed(height * 100 + width)
    q, k = (torch.randn(batch, heads, height, width, dim, generator=g, dtype=drawn) for _ in range(2))
    v = torch.randn(batch, heads, height, width, dim_v, generator=g, dtype=drawn)
    a, b = (-torch.rand(batch, heads, height, width, generator=g, dtype=drawn) for _ in range(2))
    return [x.to(device, dtype) for x in (q, k * key_scale, v, a, b)]


def weighted_sum(y: Tensor) -> Tensor:
    """Return a scalar whose gradient differs from element to element."""
    return (y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)).sum()


def run(call, inputs, backend, layout=lambda x: x):
    """Return the output and a list of gradients, None for inputs that have none."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = call(*map(layout, inputs), backend)
    weighted_sum(y).backward()
    return y.detach(), [x.grad for x in inputs]


def skip_without_triton() -> None:
    """Skip the calling test, or the whole module, where Triton kernels run neither on a GPU nor in the interpreter."""
    pytest.importorskip('triton')
    if DEVICE == 'cpu' and not launch.interpreted():
        pytest.skip('no GPU, and Triton was imported without TRITON_INTERPRET=1', allow_module_level=True)


def assert_as_exact(actual, expected, tolerance) -> None:
    """Compare an output and gradients, or None for inputs that have none, with those in float64.

    Gradients that cancel (those of one token's logits, say) are held to the scale of the others. Those of half types
    have twice the tolerance, because they pass through rounded outputs, too.
    """
    largest = max(y.abs().max() for y in expected if y is not None)
    for n, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert (x is None) == (y is None), n
        if x is not None:
            assert x.isfinite().all(), n
            scale, times = y.abs().max().clamp(min=0.05 * largest), 2 if n and x.dtype != torch.float32 else 1
            assert (x.double() - y).abs().max() <= tolerance * times * scale, n
