"""Identities of the PPMA paper (theorems 1 and 2, section 3, appendix C), in float64."""
import pytest
import torch

from subquad import kernels
from subquad.kernels.polyline_attention.reference import polyline_log_masks
from subquad.kernels.polyline_scan.reference import polyline_log_mask_3d

H, W = 4, 5
N = H * W


def _logs(seed=0, shape=(1, 2, H, W)):
    g = torch.Generator().manual_seed(seed)
    return [-torch.rand(shape, generator=g, dtype=torch.float64) for _ in range(3)]


def _qkv(seed=0, dim=6):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, H, W, dim, generator=g, dtype=torch.float64) for _ in range(3)]


def _along(steps, start, end):
    """Multiply the decay factors between two positions of a line: every step after the first up to the last."""
    first, last = sorted((start, end))
    return steps[first + 1:last + 1].sum().exp()


def _mask_by_walking(a, b):
    """Compute L[(i,j),(k,l)] of one head: along row i from j to l, then along column l from i to k."""
    mask = torch.empty(N, N, dtype=torch.float64)
    for i in range(H):
        for j in range(W):
            for k in range(H):
                for m in range(W):
                    mask[i * W + j, k * W + m] = _along(a[i], j, m) * _along(b[:, m], i, k)
    return mask


def test_mask_is_the_product_along_the_path():
    a, b, _ = _logs()
    v2h, h2v = polyline_log_masks(a, b)
    for head in range(2):
        walked = _mask_by_walking(a[0, head], b[0, head])
        torch.testing.assert_close(v2h[0, head].exp(), walked)
        torch.testing.assert_close(h2v[0, head].exp(), walked.T)


def test_theorem_1_both_decompositions():
    """L = L^H x L^V (block-diagonal matrices of row and of column decays) = L^H_hat * L^V_hat (elementwise)."""
    a, b, _ = _logs(1, (1, 1, H, W))
    mask = polyline_log_masks(a, b)[0][0, 0].exp()
    horizontal, vertical = (torch.zeros(H, W, H, W, dtype=torch.float64) for _ in range(2))
    hat_h, hat_v = (torch.empty(H, W, H, W, dtype=torch.float64) for _ in range(2))
    for i in range(H):
        for j in range(W):
            for k in range(H):
                for m in range(W):
                    hat_h[i, j, k, m] = _along(a[0, 0, i], j, m)
                    hat_v[i, j, k, m] = _along(b[0, 0, :, m], i, k)
                    if i == k:
                        horizontal[i, j, k, m] = _along(a[0, 0, i], j, m)
                    if j == m:
                        vertical[i, j, k, m] = _along(b[0, 0, :, j], i, k)
    torch.testing.assert_close(mask, horizontal.view(N, N) @ vertical.view(N, N))
    torch.testing.assert_close(mask, (hat_h * hat_v).view(N, N))


@pytest.mark.parametrize('backend', ['reference', 'portable', 'export'])
def test_theorem_2_scans_against_the_dense_mask(backend):
    a, b, _ = _logs(2)
    x = _qkv(2)[0]
    for masks, paths in zip(polyline_log_masks(a, b), ('v2h', 'h2v')):
        expected = (masks.exp() @ x.flatten(2, 3)).view_as(x)
        torch.testing.assert_close(kernels.polyline_scan(x, a, b, paths=paths, backend=backend), expected)


@pytest.mark.parametrize('backend', ['portable', 'export'])
@pytest.mark.parametrize('paths', ['v2h', 'h2v', 'both'])
def test_three_dimensions(backend, paths):
    a, b, c = _logs(3, (1, 2, 3, H, W))
    g = torch.Generator().manual_seed(3)
    x = torch.randn(1, 2, 3, H, W, 4, generator=g, dtype=torch.float64)
    walked = polyline_log_mask_3d(a, b, c)[0, 0].exp().view(3, H, W, 3, H, W)
    for i, j, k, n, m, o in ((0, 1, 2, 2, 3, 4), (2, 0, 0, 1, 3, 1)):
        path = _along(a[0, 0, i, j], k, o) * _along(b[0, 0, i, :, o], j, m) * _along(c[0, 0, :, m, o], i, n)
        torch.testing.assert_close(walked[i, j, k, n, m, o], path)
    torch.testing.assert_close(kernels.polyline_scan(x, a, b, c, paths=paths, backend=backend),
                               kernels.polyline_scan(x, a, b, c, paths=paths, backend='reference'))


def test_h2v_is_the_transpose_for_3d():
    a, b, c = _logs(4, (1, 1, 2, 3, 4))
    eye = torch.eye(24, dtype=torch.float64).view(1, 1, 2, 3, 4, 24)
    forward, back = (kernels.polyline_scan(eye, a, b, c, paths=paths).reshape(24, 24) for paths in ('v2h', 'h2v'))
    torch.testing.assert_close(forward, back.T)


@pytest.mark.parametrize('backend', ['reference', 'portable', 'export'])
def test_linear_attention_against_its_matrix(backend):
    q, k, v = _qkv(5)
    a, b, _ = _logs(5)
    q, k = q.exp(), k.exp()
    mask = sum(m.exp() for m in polyline_log_masks(a, b))
    expected = (((q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2)) * mask) @ v.flatten(2, 3)).view_as(v)
    torch.testing.assert_close(kernels.polyline_linear_attention(q, k, v, a, b, backend=backend), expected)


@pytest.mark.parametrize('backend', ['reference', 'portable', 'export'])
def test_without_decay_it_is_softmax_attention(backend):
    q, k, v = _qkv(6)
    zero = torch.zeros(1, 2, H, W, dtype=torch.float64)
    plain = ((q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2)).softmax(-1) @ v.flatten(2, 3)).view_as(v)
    torch.testing.assert_close(kernels.polyline_attention(q, k, v, zero, zero, backend=backend), plain)
    torch.testing.assert_close(
        kernels.polyline_attention(q, k, v, zero, zero, mask_mode='multiplicative', backend=backend), 2 * plain)
    rows = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    torch.testing.assert_close(kernels.decay_attention(q, k, v, zero, backend=backend), rows)


@pytest.mark.parametrize('backend', ['reference', 'portable', 'export'])
@pytest.mark.parametrize('mask_mode', ['additive', 'multiplicative'])
def test_crisscross_chains_decay_attention_on_both_paths(mask_mode, backend):
    q, k, v = _qkv(7)
    a, b, _ = _logs(7)

    def one(axis, x, logs):
        return kernels.decay_attention(q, k, x, logs, axis=axis, mask_mode=mask_mode, backend='reference')
    v2h, h2v = one('row', one('column', v, b), a), one('column', one('row', v, a), b)
    for paths, expected in (('v2h', v2h), ('h2v', h2v), ('both', (v2h + h2v) / 2)):
        y = kernels.crisscross_attention(q, k, v, a, b, mask_mode=mask_mode, paths=paths, backend=backend)
        torch.testing.assert_close(y, expected)


def test_the_one_line_formula_of_the_paper_is_not_the_sum_of_both_paths():
    """((S^H x S^V) * L2D) v, as printed once, needs S^V x S^H with the transposed mask."""
    q, k, v = _qkv(8)
    a, b, _ = _logs(8)
    rows = torch.zeros(1, 2, H, W, H, W, dtype=torch.float64)
    columns = torch.zeros_like(rows)
    for i in range(H):
        rows[:, :, i, :, i, :] = (q[:, :, i] @ k[:, :, i].transpose(-1, -2)).softmax(-1)
    for j in range(W):
        columns[:, :, :, j, :, j] = (q[:, :, :, j] @ k[:, :, :, j].transpose(-1, -2)).softmax(-1)
    rows, columns = (x.reshape(1, 2, N, N) for x in (rows, columns))
    v2h, h2v = (m.exp() for m in polyline_log_masks(a, b))
    both = (rows @ columns) * v2h + (columns @ rows) * h2v
    printed = (rows @ columns) * (v2h + h2v)
    ours = kernels.crisscross_attention(q, k, v, a, b, mask_mode='multiplicative') * 2
    torch.testing.assert_close(ours, (both @ v.flatten(2, 3)).view_as(v))
    assert ((printed - both) @ v.flatten(2, 3)).abs().max() > 0.1 * ours.abs().max()


def test_rmt_decay_is_manhattan():
    from subquad.backbones.mixers import PolylineMixer
    mixer = PolylineMixer(32, 4, paths='rmt')
    a, b = mixer.decay_logs(torch.zeros(1, H, W, 32))
    assert torch.equal(a, b) and a[0, 0, 0, 0].item() == pytest.approx(torch.tensor(0.75).log().item())
    v2h = polyline_log_masks(a.double(), b.double())[0][0, 1].view(H, W, H, W)
    step = a[0, 1, 0, 0].double()
    torch.testing.assert_close(v2h[0, 0, 3, 4], 7 * step)
