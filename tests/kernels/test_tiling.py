"""Operators in bands equal those on the whole image; memory stays bounded."""
import numpy as np
import pytest
import torch
from helpers import assert_close
from pairwise import pairwise

from subquad.kernels import eos_elementwise, eos_matmul, polyline_scan, quadtree_solve
from subquad.kernels.eos_scan import DecayGenerator
from subquad.kernels.tiling import (
    eos_elementwise_tiled,
    eos_matmul_tiled,
    polyline_scan_tiled,
    quadtree_solve_tiled,
)
from subquad.kernels.trees import PARAMETRIZATIONS, quadtree_levels

SIZES = [(1, 1), (2, 3), (7, 5), (16, 8), (21, 33), (70, 9)]


def steps(*shape):
    """Step logs from nearly 0 to strong."""
    return -torch.rand(*shape).pow(4) * 3


@pairwise('size, paths, rows', SIZES, ['v2h', 'h2v', 'both'], [1, 8, 100])
def test_polyline_scan(size, paths, rows):
    x, log_alpha, log_beta = torch.randn(2, 3, *size, 4), steps(2, 3, *size), steps(2, 3, *size)
    out = torch.full_like(x, torch.nan)
    polyline_scan_tiled(x, log_alpha, log_beta, out, paths=paths, rows=rows)
    assert_close(out, polyline_scan(x, log_alpha, log_beta, paths=paths, backend='reference'), 1e-5)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), (torch.float16, 2e-3)])
def test_polyline_scan_in_other_dtypes(dtype, tolerance):
    x, log_alpha, log_beta = torch.randn(1, 2, 11, 6, 3).to(dtype), steps(1, 2, 11, 6), steps(1, 2, 11, 6)
    out = torch.empty_like(x)
    polyline_scan_tiled(x, log_alpha.to(dtype), log_beta.to(dtype), out, paths='both', rows=4)
    expected = polyline_scan(x.double(), log_alpha.to(dtype).double(), log_beta.to(dtype).double(), paths='both')
    assert_close(out, expected.to(dtype), tolerance)


def test_steps_that_forget_everything():
    x, log_alpha, log_beta = torch.randn(1, 1, 9, 7, 2), steps(1, 1, 9, 7), steps(1, 1, 9, 7)
    log_beta[:, :, [3, 4, 6]] = -torch.inf
    out = torch.empty_like(x)
    polyline_scan_tiled(x, log_alpha, log_beta, out, paths='both', rows=3)
    assert_close(out, polyline_scan(x, log_alpha, log_beta, paths='both'), 1e-5)


@pytest.mark.parametrize('least, tolerance', [(-1, 3e-6), (-5, 1e-5), (-20, 4e-5), (-80, 2e-4)])
def test_strong_decays_in_float32(least, tolerance):
    """Both forms are as near to float64 as docs/any-resolution.md says, relative to the largest result."""
    shape = (1, 2, 256, 64)
    x, log_alpha, log_beta = torch.randn(*shape, 4), least * torch.rand(shape), least * torch.rand(shape)
    exact = polyline_scan(x.double(), log_alpha.double(), log_beta.double(), paths='both', backend='portable')
    whole, tiled = polyline_scan(x, log_alpha, log_beta, paths='both', backend='portable'), torch.empty_like(x)
    polyline_scan_tiled(x, log_alpha, log_beta, tiled, paths='both', rows=64)
    for y in (whole, tiled):
        assert (y - exact).abs().max() < tolerance * exact.abs().max()
    tiled = torch.empty_like(exact)
    polyline_scan_tiled(x.double(), log_alpha.double(), log_beta.double(), tiled, paths='both', rows=64)
    assert_close(tiled, exact, 1e-12)


@pytest.mark.parametrize('shape', [(0, 2, 9, 7, 3), (2, 0, 9, 7, 3), (2, 3, 9, 7, 0)])
def test_empty_batches(shape):
    """All bands are written, and have no elements."""
    x, log = torch.zeros(shape), torch.zeros(shape[:-1])
    out, found = torch.zeros(shape), []
    polyline_scan_tiled(x, log, log, out, paths='both', rows=4)
    polyline_scan_tiled(x, log, log, lambda start, stop, band: found.append(band), rows=4)
    assert out.shape == shape and torch.cat(found, 2).shape == shape
    values, edges = ([torch.zeros(*part.shape[:2], *level[:2], *part.shape[4:]) for level in quadtree_levels(9, 7)]
                     for part in (x, log))
    out = [torch.zeros_like(value) for value in values]
    quadtree_solve_tiled(values, edges[:-1], out, rows=4)
    assert [y.shape for y in out] == [value.shape for value in values]


LINE, KEYS, WIDTH = 45, 4, 3
OSCILLATIONS = {
    'none': dict(),
    'keys': dict(log_o_k=lambda: steps(2, 2, LINE, KEYS)),
    'constant': dict(log_o_k=lambda: steps(2, KEYS)),
    'rank_one': dict(log_o_k=lambda: steps(2, 2, LINE, KEYS), log_o_d=lambda: steps(2, 2, LINE, WIDTH)),
    'full': dict(log_o=lambda: steps(2, 2, LINE, KEYS, WIDTH)),
    'angles': dict(log_o_k=lambda: steps(2, 2, LINE, KEYS), theta=lambda: torch.randn(2, 2, LINE, KEYS)),
    'constant_angles': dict(log_o=lambda: steps(2, KEYS, WIDTH), theta=lambda: torch.randn(2, KEYS, WIDTH)),
    'generator': dict(generator=lambda: DecayGenerator(torch.randn(2, 2, LINE, 4), torch.randn(2, 4, WIDTH), 'k')),
}
WAYS = [dict(), dict(reverse=True), dict(bidirectional=True)]


@pairwise('case, segment, way', OSCILLATIONS, [7, 16, 64], WAYS)
def test_eos_elementwise(case, segment, way):
    options = {name: make() for name, make in OSCILLATIONS[case].items()}
    i, e, s = torch.randn(2, 2, LINE, WIDTH), torch.randn(2, 2, LINE, KEYS), torch.randn(2, 2, LINE, KEYS)
    out = torch.full_like(i, torch.nan)
    eos_elementwise_tiled(i, e, s, out, segment=segment, scale=0.5, **options, **way)
    assert_close(out, eos_elementwise(i, e, s, scale=0.5, **options, **way, backend='reference'), 1e-5)


@pytest.mark.parametrize('e_tokens', [True, False])
@pytest.mark.parametrize('s_tokens', [True, False])
@pytest.mark.parametrize('is_complex', [False, True])
def test_eos_elementwise_with_constant_states(e_tokens, s_tokens, is_complex):
    dtype = torch.complex64 if is_complex else torch.float32
    i, options = torch.randn(2, 2, LINE, WIDTH), dict(log_o_k=steps(2, KEYS))
    if is_complex:
        options['theta'] = torch.randn(2, KEYS)
    e, s = (torch.randn(*((2, 2, LINE, KEYS) if tokens else (2, KEYS, WIDTH)), dtype=dtype)
            for tokens in (e_tokens, s_tokens))
    out = torch.empty_like(i)
    eos_elementwise_tiled(i, e, s, out, segment=20, bidirectional=True, **options)
    assert_close(out, eos_elementwise(i, e, s, bidirectional=True, **options), 1e-5)


@pytest.mark.parametrize('way', WAYS, ids=str)
def test_eos_matmul(way):
    i, e, s, a, b = torch.randn(2, 2, LINE, WIDTH), *torch.randn(4, 2, 2, LINE, KEYS) / 3
    gk, out = steps(2, 2, LINE, KEYS), torch.empty_like(i)
    eos_matmul_tiled(i, e, s, out, a=a, b=b, gk=gk, segment=17, **way)
    assert_close(out, eos_matmul(i, e, s, a=a, b=b, gk=gk, **way), 1e-5)


@pytest.mark.parametrize('reverse', [False, True])
def test_states_of_a_line(reverse):
    i, e, s, log = torch.randn(1, 2, LINE, WIDTH), *torch.randn(2, 1, 2, LINE, KEYS), steps(1, 2, LINE, KEYS)
    state, out = torch.randn(1, 2, KEYS, WIDTH), torch.empty(1, 2, LINE, WIDTH)
    last = eos_elementwise_tiled(i, e, s, out, log_o_k=log, initial_state=state, reverse=reverse, segment=16)
    y, expected = eos_elementwise(i, e, s, log_o_k=log, initial_state=state, reverse=reverse, output_state=True)
    assert_close(out, y, 1e-5)
    assert_close(last, expected, 1e-5)


def tree(size, parametrization, shift=(0, 0), count=None, dim=3):
    levels = quadtree_levels(*size, count, shift)
    values = [torch.randn(2, 2, *level[:2], dim) for level in levels]
    edges = [torch.randn(2, 2, *level[:2]) * 3 for level in levels[:-1]]
    if parametrization == 'laplacian':
        edges = [edge.exp() * 2.0 ** n for n, edge in enumerate(edges)]
    return values, edges


@pairwise('size, rows, shift, parametrization', SIZES, [2, 8, 128], [(0, 0), (3, 5)], PARAMETRIZATIONS)
def test_quadtree_solve(size, rows, shift, parametrization):
    values, edges = tree(size, parametrization, shift)
    out = [torch.full_like(x, torch.nan) for x in values]
    quadtree_solve_tiled(values, edges, out, parametrization=parametrization, shift=shift, rows=rows)
    for x, expected in zip(out, quadtree_solve(values, edges, parametrization=parametrization, shift=shift)):
        assert_close(x, expected, 1e-5)


@pytest.mark.parametrize('count', [1, 2, 3])
def test_forest(count):
    values, edges = tree((21, 13), 'laplacian', count=count)
    out = [torch.empty_like(x) for x in values]
    quadtree_solve_tiled(values, edges, out, rows=4)
    for x, expected in zip(out, quadtree_solve(values, edges)):
        assert_close(x, expected, 1e-5)


def test_files_and_functions(tmp_path):
    """Memory-mapped files are read and written, also read-only ones; functions get each band of the result once."""
    x, log_alpha, log_beta = torch.randn(1, 1, 13, 6, 2), steps(1, 1, 13, 6), steps(1, 1, 13, 6)
    paths = [tmp_path / name for name in ('x.npy', 'alpha.npy')]
    for path, tensor in zip(paths, (x, log_alpha)):
        np.save(path, tensor.numpy())
    files = [np.load(path, mmap_mode='r') for path in paths]
    out = np.lib.format.open_memmap(tmp_path / 'out.npy', 'w+', np.float32, x.shape)
    polyline_scan_tiled(*files, lambda start, stop: log_beta[:, :, start:stop], out, rows=5)
    expected = polyline_scan(x, log_alpha, log_beta)
    assert_close(torch.from_numpy(np.array(out)), expected, 1e-5)

    found = []
    polyline_scan_tiled(lambda start, stop: x[:, :, start:stop], files[1], log_beta,
                        lambda start, stop, band: found.append((start, stop, band)), size=(13, 6), rows=5)
    assert [entry[:2] for entry in found] == [(0, 5), (5, 10), (10, 13)]
    assert_close(torch.cat([band for *_, band in found], 2), expected, 1e-5)

    values, edges = tree((9, 6), 'laplacian')
    leaves = []
    quadtree_solve_tiled([lambda start, stop: values[0][:, :, start:stop], *values[1:]], edges,
                         [lambda start, stop, band: leaves.append(band), *[None] * (len(values) - 1)], rows=4,
                         size=(9, 6))
    assert_close(torch.cat(leaves, 2), quadtree_solve(values, edges)[0], 1e-5)


X, LOG = torch.zeros(1, 1, 8, 4, 2), torch.zeros(1, 1, 8, 4)
LONG = torch.zeros(1, 1, 12, 4)


@pytest.mark.parametrize('call, error, message', [
    (lambda: polyline_scan_tiled(X, LOG, LOG, X, paths='2d'), ValueError, 'paths'),
    (lambda: polyline_scan_tiled(X, LOG, LOG, X, rows=0), ValueError, 'rows must be an integer of at least 1, got 0'),
    (lambda: polyline_scan_tiled(X, LOG[:, :, :6], LOG, X, rows=4), ValueError, 'log_alpha must have the hei'),
    (lambda: polyline_scan_tiled(X, lambda start, stop: LOG[:, :, start:min(stop, 6)], LOG, X, rows=4), ValueError,
     'log_alpha must have 4 entries from 4'),
    (lambda: polyline_scan_tiled(X, LONG, LOG, X), ValueError, r'log_alpha must .* of x, \(8, 4\), got \(1, 1, 12'),
    (lambda: polyline_scan_tiled(X, LOG, LONG, X), ValueError, r'log_beta must .* of x, \(8, 4\), got \(1, 1, 12, 4\)'),
    (lambda: polyline_scan_tiled(X, LOG, LOG, X.new_zeros(1, 1, 12, 4, 2)), ValueError, 'out must have the height and'),
    (lambda: polyline_scan_tiled(X, LOG, LOG, X.long()), TypeError, 'out must have a floating-point dtype, got torch'),
    (lambda: polyline_scan_tiled(X, LOG, LOG, X.numpy().astype(bool)), TypeError, 'floating-point dtype, got bool'),
    (lambda: polyline_scan_tiled(lambda *band: X, LOG, LOG, X, size=8), ValueError, 'size must be 2 integers .* got 8'),
    (lambda: polyline_scan_tiled(X, LOG + 1, LOG, X), ValueError, 'log_alpha'),
    (lambda: polyline_scan_tiled(X, LOG, LOG, X[..., :1]), ValueError, 'out must have the shape of the result'),
    (lambda: polyline_scan_tiled(X, LOG, LOG, 'file'), TypeError, 'out must be an array or a function .* got str'),
    (lambda: polyline_scan_tiled(X, None, LOG, X), TypeError, 'log_alpha must be an array or a function .* NoneType'),
    (lambda: polyline_scan_tiled(lambda *band: X, LOG, LOG, X), ValueError, 'size is needed where the input is a func'),
    (lambda: polyline_scan_tiled(X, LOG, LOG, X, size=(4, 8)), ValueError, r'size must be that of the input, \(8, 4\)'),
    (lambda: polyline_scan_tiled(lambda *band: X, *[lambda *band: LOG] * 2, None, size=(16, 4), rows=4), ValueError,
     'x must have 4 entries'),
    (lambda: polyline_scan_tiled(lambda *band: 1, LOG, LOG, X, size=(8, 4)), TypeError, 'function x must return a ten'),
    (lambda: eos_elementwise_tiled(*[LOG] * 4, segment=0), ValueError, 'segment must be an integer of at least 1'),
    (lambda: eos_elementwise_tiled(*[LOG] * 4, reverse=1), TypeError, 'reverse'),
    (lambda: eos_elementwise_tiled(*[LOG] * 4, reverse=True, bidirectional=True), ValueError, 'exclude each other'),
    (lambda: eos_elementwise_tiled(*[LOG] * 4, initial_state=LOG, bidirectional=True), ValueError, 'no state at one'),
    (lambda: eos_elementwise_tiled(LOG, LOG, lambda *segment: LOG[:, :, :1], LOG), ValueError, 's must have 8 entries'),
    (lambda: quadtree_solve_tiled([X], [], [X], rows=6), ValueError, 'rows must be a power of 2 from 2 on, got 6'),
    (lambda: quadtree_solve_tiled([X], [LOG], [X]), ValueError, r'edges must have one entry .* \(0\), got 1'),
    (lambda: quadtree_solve_tiled([], [], []), ValueError, 'at least one level, got none'),
    (lambda: quadtree_solve_tiled([X], [], []), ValueError, 'out must have one entry for each of the 1 levels, got 0'),
    (lambda: quadtree_solve_tiled([X, X], [LOG], [X, X]), ValueError, r'values\[1\] must have the height and width'),
    (lambda: quadtree_solve_tiled([X, X[:, :, ::2, ::2]], [LOG - 1], [X, None]), ValueError, r'edges\[0\]'),
    (lambda: quadtree_solve_tiled([X], [], None), TypeError, 'out must be a list with one entry for each level, got N'),
    (lambda: quadtree_solve_tiled(X, [], [X]), TypeError, 'values must be a list with one entry .* got Tensor'),
    (lambda: quadtree_solve_tiled([X], [], [X], shift=5), ValueError, 'shift must be two integers .*, got 5'),
    (lambda: quadtree_solve_tiled([X], [], [X.int()]), TypeError, r'out\[0\] must have a floating-point dtype'),
    (lambda: quadtree_solve_tiled([X], [], [X.new_zeros(1, 1, 12, 4, 2)]), ValueError, r'out\[0\] must have the hei'),
    (lambda: eos_elementwise_tiled(*[LOG] * 3, LOG.long()), TypeError, 'out must have a floating-point dtype'),
    (lambda: quadtree_solve_tiled([X], [], [X], rho=1.0), ValueError, 'rho must be between 0 and 1, got 1.0'),
])
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
