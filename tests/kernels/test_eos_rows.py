"""Rows of the LCSM paper's Table 1 (corrected) as calls of the two operators, each against its own recurrence.

The recurrences are written from the definitions of the cited papers, one token at a time, in float64. There are B
sequences of T tokens, with D channels of values and K of keys or states."""
import math

import torch
import torch.nn.functional as F
from helpers import assert_close

from subquad.kernels import eos_elementwise
from subquad.kernels.eos_scan import DecayGenerator

B, H, T, K, D = 2, 3, 40, 4, 5


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def rand(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def qkv():
    return randn(B, H, T, K), randn(B, H, T, K), randn(B, H, T, D)


def stacked(outputs):
    return torch.stack(outputs, 2)


# --- state space models: x' = A x + B u with one input for each channel, discretized

def _diagonal_system(channels=D):
    """Return u (B, T, channels) and lambda, b, c of K complex modes: |lambda| < 1."""
    decay, angle = 0.5 * rand(K) + 0.01, 2 * randn(K)
    b, c = (torch.complex(randn(channels, K), randn(channels, K)) for _ in range(2))
    return randn(B, T, channels), decay, angle, b, c


def test_s4_with_a_diagonal_matrix():
    """S4D (Gu et al., 2022): x_t = diag(lambda) x_{t-1} + b u_t, y_t = Re(c x_t), a system for each channel."""
    u, decay, angle, b, c = _diagonal_system()
    step, x, expected = torch.polar((-decay).exp(), angle), torch.zeros(B, D, K, dtype=torch.complex128), []
    for t in range(T):
        x = step * x + b * u[:, t, :, None]
        expected.append((c * x).sum(-1).real)
    y = eos_elementwise(u[:, None], b.T[None], c.T[None], log_o_k=-decay[None], theta=angle[None])
    assert_close(y[:, 0], torch.stack(expected, 1), 1e-10)


def test_s4_with_a_full_matrix():
    """S4 (Gu et al., 2021): x_t = A x_{t-1} + b u_t with the HiPPO-LegS matrix, discretized bilinearly.

    In the basis of A's eigenvectors it is a diagonal system with complex modes: e = V^-1 b, s = c V."""
    n = torch.arange(K, dtype=torch.float64)
    root = (2 * n + 1).sqrt()
    hippo = -(torch.outer(root, root).tril(-1) + torch.diag(n + 1))
    eye, step = torch.eye(K, dtype=torch.float64), 0.1
    a = torch.linalg.solve(eye - step / 2 * hippo, eye + step / 2 * hippo)
    b, c, u = torch.linalg.solve(eye - step / 2 * hippo, step * root), randn(D, K), randn(B, T, D)
    x, expected = torch.zeros(B, D, K, dtype=torch.float64), []
    for t in range(T):
        x = x @ a.T + b * u[:, t, :, None]
        expected.append((c * x).sum(-1))
    modes, vectors = torch.linalg.eig(a)
    e = torch.linalg.solve(vectors, b.to(vectors.dtype))[None, :, None].expand(1, K, D)
    s = (c.to(vectors.dtype) @ vectors).T[None]
    y = eos_elementwise(u[:, None], e, s, log_o_k=modes.abs().log()[None], theta=modes.angle()[None])
    assert_close(y[:, 0], torch.stack(expected, 1), 1e-10)


def test_s5():
    """S5 (Smith et al., 2022): x_t = diag(lambda) x_{t-1} + B u_t, y_t = Re(C x_t), all channels in one system.

    Each mode is a head with a memory of one number. s = 1 reads its real part, s = -i its imaginary part."""
    decay, angle = 0.5 * rand(K) + 0.01, 2 * randn(K)
    matrix_b, matrix_c = (torch.complex(randn(*shape), randn(*shape)) for shape in ((K, D), (D, K)))
    u, x, expected = randn(B, T, D), torch.zeros(B, K, dtype=torch.complex128), []
    step = torch.polar((-decay).exp(), angle)
    for t in range(T):
        x = step * x + u[:, t].to(x.dtype) @ matrix_b.T
        expected.append((x @ matrix_c.T).real)
    e = (u.to(x.dtype) @ matrix_b.T).mT.unsqueeze(-1)                         # (B, K heads, T, 1)
    ones = torch.ones(B, K, T, 1, dtype=torch.float64)
    parts = [eos_elementwise(ones, e, s * ones, log_o_k=-decay[:, None], theta=angle[:, None])[..., 0].mT
             for s in (1, -1j)]
    assert_close((torch.complex(*parts) @ matrix_c.T).real, torch.stack(expected, 1), 1e-10)


def test_the_printed_row_of_s5_is_another_model():
    """A memory K x D with e = B and s = C, elementwise, is a bank of D systems: it does not mix channels."""
    matrix_b, matrix_c, u = rand(K, D), rand(D, K), rand(B, T, D)
    x, expected = torch.zeros(B, K, dtype=torch.float64), []
    for t in range(T):
        x = 0.9 * x + u[:, t] @ matrix_b.T
        expected.append(x @ matrix_c.T)
    printed = eos_elementwise(u[:, None], matrix_b[None], matrix_c.T[None],
                              log_o_k=torch.full((1, 1), math.log(0.9), dtype=torch.float64))
    assert (printed[:, 0] - torch.stack(expected, 1)).abs().max() > 1


def test_dss():
    """DSS (Gupta et al., 2022): a convolution with the kernel k_n = Re sum_j w_j lambda_j^n."""
    u, decay, angle, _, w = _diagonal_system()
    powers = (torch.complex(-decay, angle)[:, None] * torch.arange(T)).exp()                  # (K, T)
    kernel = (w @ powers).real                                                                # (D, T)
    expected = torch.stack([(kernel[:, :t + 1].flip(1) * u[:, :t + 1].mT).sum(-1) for t in range(T)], 1)
    y = eos_elementwise(u[:, None], torch.ones(1, K, D, dtype=torch.float64), w.T[None], log_o_k=-decay[None],
                        theta=angle[None])
    assert_close(y[:, 0], expected, 1e-10)


def test_tnn():
    """TNN as a recurrence (Qin & Zhong, 2023): a Toeplitz matrix t_n = sum_k Re(b_k lambda_k^n) for each channel."""
    decay, angle, b, u = 0.3 * rand(K), randn(K), randn(K, D), randn(B, T, D)
    modes = torch.polar((-decay).exp(), angle)
    toeplitz = torch.zeros(D, T, T, dtype=torch.float64)
    for t in range(T):
        for j in range(t + 1):
            toeplitz[:, t, j] = ((modes ** (t - j))[:, None] * b).sum(0).real
    y = eos_elementwise(u[:, None], b[None], torch.ones(1, K, D, dtype=torch.float64), log_o_k=-decay[None],
                        theta=angle[None])
    assert_close(y[:, 0], torch.einsum('dtj,bjd->btd', toeplitz, u), 1e-10)


# --- linear attention and gates


def test_complex_hgrn():
    """HGRN with a fixed phase: f_t e^{i theta}, and real and imaginary parts of the state as the output."""
    f, theta = randn(B, T, D).sigmoid(), randn(D)
    c = torch.complex(randn(B, T, D), randn(B, T, D))
    h, expected = torch.zeros(B, D, dtype=torch.complex128), []
    for t in range(T):
        h = f[:, t] * torch.polar(torch.ones_like(theta), theta) * h + (1 - f[:, t]) * c[:, t]
        expected.append(h)
    e = ((1 - f) * c).mT.unsqueeze(-1)                                        # a head for each channel
    ones = torch.ones(B, D, T, 1, dtype=torch.float64)
    parts = [eos_elementwise(ones, e, s * ones, log_o_k=f.log().mT.unsqueeze(-1), theta=theta[:, None])[..., 0].mT
             for s in (1, -1j)]
    expected = torch.stack(expected, 1)
    assert_close(parts[0], expected.real, 1e-10)
    assert_close(parts[1], expected.imag, 1e-10)


# --- matrices


# --- oscillation types of Tables 2 and 3

def test_oscillation_types():
    """Types 0 to 10 by their formulas sigmoid(.)^(1/tau), with the memory's loop."""
    tau, (q, k, v) = 16.0, qkv()
    z_k, z_d, matrix, a_k, a_d = randn(B, H, T, K), randn(B, H, T, D), randn(H, K, D), randn(H, K), randn(H, D)
    ones_k, ones_d = torch.ones(K, dtype=torch.float64), torch.ones(D, dtype=torch.float64)

    def log(x):
        return F.logsigmoid(x) / tau

    types = {
        0: (matrix[:, None], dict(log_o=log(matrix))),
        2: (z_d[..., None, :] * ones_k[:, None], dict(log_o_d=log(z_d))),
        3: (z_k[..., :, None] * ones_d, dict(log_o_k=log(z_k))),
        4: (a_k[:, None, :, None] * ones_d, dict(log_o_k=log(a_k))),
        5: (a_d[:, None, None, :] * ones_k[:, None], dict(log_o_d=log(a_d))),
        6: (z_k[..., :, None] * matrix[:, None], dict(generator=DecayGenerator(z_k, matrix, 'k', tau=tau))),
        7: (z_d[..., None, :] * matrix[:, None], dict(generator=DecayGenerator(z_d, matrix, 'd', tau=tau))),
        8: (z_d[..., None, :] * a_k[:, None, :, None],
            dict(generator=DecayGenerator(z_d, a_k[..., None], 'd', tau=tau))),
        9: (z_k[..., :, None] * a_d[:, None, None], dict(generator=DecayGenerator(z_k, a_d[:, None], 'k', tau=tau))),
    }
    cases = {number: (x.sigmoid() ** (1 / tau), given) for number, (x, given) in types.items()}
    cases[1] = ((z_k.sigmoid()[..., None] * z_d.sigmoid()[..., None, :]) ** (1 / tau),
                dict(log_o_k=log(z_k), log_o_d=log(z_d)))
    cases[10] = (torch.ones(1, 1, 1, K, D, dtype=torch.float64), {})
    for number, (o, given) in cases.items():
        o = o.expand(B, H, T, K, D)
        state, expected = torch.zeros(B, H, K, D, dtype=torch.float64), []
        for t in range(T):
            state = o[:, :, t] * state + k[:, :, t, :, None] * v[:, :, t, None]
            expected.append((q[:, :, t, None] @ state)[:, :, 0])
        assert_close(eos_elementwise(v, k, q, **given), stacked(expected), 1e-10, f'type {number}')
