"""Calls of the operators with step logs, inputs for them, and their outputs and gradients, for the kernel tests."""
import pytest
import torch
from torch import Tensor

from subquad import kernels
from subquad.kernels.common import launch

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
