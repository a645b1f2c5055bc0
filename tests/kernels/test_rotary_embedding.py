"""Rotary embedding: every backend against the float64 reference, with gradients; kept tables; registration with
PyTorch. Kernels run on a GPU, or without one in Triton's interpreter."""
import importlib.util

import pytest
import torch
from operator_cases import DEVICE, TOLERANCE, weighted_sum

from subquad import kernels
from subquad.kernels.common import launch
from subquad.kernels.rotary_embedding import angles

BACKENDS = ['portable', 'export', 'triton']
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _needs_triton(backend):
    if backend == 'triton' and not (importlib.util.find_spec('triton') and (DEVICE == 'cuda' or launch.interpreted())):
        pytest.skip('there is neither a GPU nor the interpreter of Triton')


def _inputs(batch, heads, tokens, dim, dtype=torch.float32):
    """Return q, k as slices of one tensor (B, N, 2 heads D), as a projection makes them, and a table."""
    g = torch.Generator().manual_seed(tokens + dim)
    x = torch.randn(batch, tokens, 2 * heads * dim, generator=g).to(DEVICE, dtype)
    q, k = (y.unflatten(2, (heads, dim)).transpose(1, 2) for y in x.chunk(2, -1))
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    return q, k, angles.rotary_table(tokens, dim, x.device, kind)


def _run(q, k, table, backend):
    """Return the outputs and the gradients of q and k."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    outputs = kernels.rotary_embedding(q, k, table, 0.3, backend=backend)
    (weighted_sum(outputs[0]) + weighted_sum(outputs[1]) * 2).backward()
    return [*(y.detach() for y in outputs), q.grad, k.grad]


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', [(2, 3, 37, 8), (1, 5, 20, 20), (1, 1, 1, 2), (1, 2, 17, 64)], ids=str)
@pytest.mark.parametrize('backend', BACKENDS)
def test_values_and_gradients(backend, shape, dtype):
    _needs_triton(backend)
    q, k, table = _inputs(*shape, dtype)
    expected = _run(q.double(), k.double(), table.double(), 'reference')
    for actual, exact in zip(_run(q, k, table, backend), expected, strict=True):
        assert actual.dtype == dtype and actual.shape == exact.shape
        assert (actual.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.parametrize('backend', ['portable', 'export'])
def test_float64(backend):
    q, k, table = _inputs(1, 2, 9, 6, torch.float64)
    for actual, exact in zip(_run(q, k, table, backend), _run(q, k, table, 'reference'), strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('backend', BACKENDS)
def test_half_types_are_rounded_once(backend):
    """The cosines are not rounded to bfloat16, whose error would grow with the length of the vectors."""
    _needs_triton(backend)
    q, k, table = _inputs(1, 2, 500, 8, torch.bfloat16)
    exact = kernels.rotary_embedding(q.double(), k.double(), table.double(), backend='reference')[0]
    actual = kernels.rotary_embedding(q, k, table, backend=backend)[0].double()
    # One rounding: half a unit in the last place, or a whole one where the interpreter rounds towards zero.
    assert ((actual - exact).abs() <= exact.abs() * 2 ** -7 + 1e-6).all()
    norms = [x.unflatten(-1, (-1, 2)).norm(dim=-1) for x in (actual, q.double())]
    assert (norms[0] / norms[1] - 1).abs().max() < 2 ** -6


@pytest.mark.parametrize('backend', BACKENDS)
def test_strides(backend):
    _needs_triton(backend)
    q, k, table = _inputs(2, 3, 10, 8)
    expected = kernels.rotary_embedding(q, k, table, backend='reference')
    q = q.contiguous()
    k = k.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)                      # channels are not dense
    for actual, exact in zip(kernels.rotary_embedding(q, k, table, backend=backend), expected):
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-5)


def test_the_operator_passes_opcheck():
    _needs_triton('triton')
    q, k, table = _inputs(1, 2, 5, 4)
    torch.library.opcheck(torch.ops.subquad.rotary_embedding_fwd,
                          (q.detach().requires_grad_(), k.detach().requires_grad_(), table, 0.3, False))


@pytest.mark.parametrize('backend', ['portable', 'triton'])
def test_compiles_to_one_graph(backend):
    _needs_triton(backend)
    q, k, _ = _inputs(1, 2, 6, 4)
    with kernels.use_backend(backend):
        compiled = torch.compile(lambda q, k: kernels.rotary_embedding(q, k, scale=0.5),
                                 backend='aot_eager', fullgraph=True)
        for actual, exact in zip(compiled(q, k), kernels.rotary_embedding(q, k, scale=0.5)):
            torch.testing.assert_close(actual, exact)


def test_tables_are_made_once_and_serve_training_after_inference_mode(monkeypatch):
    angles.kept_table.cache_clear()
    (q, k, _), made, make = _inputs(1, 2, 6, 4), [], angles.rotary_table
    monkeypatch.setattr(angles, 'rotary_table', lambda *key: made.append(key) or make(*key))
    with torch.inference_mode():
        kernels.rotary_embedding(q, k, scale=0.5)
    for _ in range(2):
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        sum(y.square().sum() for y in kernels.rotary_embedding(q, k, scale=0.5)).backward()
        assert q.grad is not None
    assert len(made) == 1
    kernels.rotary_embedding(q.double(), k.double(), scale=0.5)          # another dtype, another table
    kernels.rotary_embedding(*(x.to('meta') for x in (q, k)), scale=0.5)          # another device
    kernels.rotary_embedding(q.detach()[:, :, :5], k.detach()[:, :, :5], scale=0.5)          # another size
    assert len(made) == 4 and len(set(made)) == 4
    assert angles.kept_table.cache_parameters()['maxsize'] == 16


def test_traces_do_not_keep_tables():
    angles.kept_table.cache_clear()
    q, k, _ = _inputs(1, 2, 6, 4)
    torch.compile(lambda q, k: kernels.rotary_embedding(q, k, scale=0.5), backend='eager')(q, k)
    with torch.no_grad():
        torch.vmap(lambda q, k: kernels.rotary_embedding(q[None], k[None], scale=0.5))(q, k)
    assert angles.kept_table.cache_info().currsize == 0


@pytest.mark.parametrize('change, error, message', [
    (dict(q=torch.zeros(2, 6, 4)), ValueError, 'q must have 4 dimensions'),
    (dict(k=torch.zeros(1, 2, 5, 4)), ValueError, r'k must have shape \(1, 2, 6, 4\)'),
    (dict(k=torch.zeros(1, 2, 6, 4).half()), TypeError, 'q, k must share a dtype'),
    (dict(q=torch.zeros(1, 2, 6, 3), k=torch.zeros(1, 2, 6, 3)), ValueError, 'an even number of channels'),
    (dict(table=torch.zeros(6, 4, 2)), ValueError, r'table must have shape \(6, 2, 2\)'),
    (dict(table=torch.zeros(6, 2, 2).half()), TypeError, 'table must have dtype torch.float32'),
    (dict(backend='cuda'), ValueError, "unknown backend 'cuda'")])
def test_wrong_arguments_are_refused(change, error, message):
    arguments = dict(q=torch.zeros(1, 2, 6, 4), k=torch.zeros(1, 2, 6, 4), table=torch.zeros(6, 2, 2)) | change
    with pytest.raises(error, match=message):
        kernels.rotary_embedding(arguments.pop('q'), arguments.pop('k'), arguments.pop('table'), **arguments)
