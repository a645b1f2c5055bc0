"""Rows of the LCSM paper's Table 1 (corrected) as calls of the two operators, each against its own recurrence.

The recurrences are written from the definitions of the cited papers, one token at a time, in float64. There are B
sequences of T tokens, with D channels of values and K of keys or states."""
import math

import torch
import torch.nn.functional as F
from helpers import assert_close

from subquad.kernels import eos_elementwise, eos_matmul
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


def test_mamba():
    """Mamba's selective scan (Gu & Dao, 2023): h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t, y_t = C_t h_t."""
    x, delta, a = randn(B, T, D), F.softplus(randn(B, T, D)), -rand(D, K).exp()
    matrix_b, matrix_c = randn(B, T, K), randn(B, T, K)
    h, expected = torch.zeros(B, D, K, dtype=torch.float64), []
    for t in range(T):
        h = (delta[:, t, :, None] * a).exp() * h + (delta[:, t] * x[:, t])[..., None] * matrix_b[:, t, None]
        expected.append((h * matrix_c[:, t, None]).sum(-1))
    generator = DecayGenerator(delta[:, None], -a.T[None], 'd', 'exponential')
    y = eos_elementwise((delta * x)[:, None], matrix_b[:, None], matrix_c[:, None], generator=generator)
    assert_close(y[:, 0], torch.stack(expected, 1), 1e-10)


# --- linear attention and gates

def test_linear_attention():
    """Katharopoulos et al., 2020: y_t = q_t sum_{j <= t} k_j v_j', and its denominator by a value of 1."""
    q, k, v = qkv()
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = (q @ k.mT).tril()
    assert_close(eos_elementwise(v, k, q), weights @ v, 1e-10)
    with_one = eos_elementwise(torch.cat([v, torch.ones_like(v[..., :1])], -1), k, q)
    assert_close(with_one[..., :-1] / with_one[..., -1:], weights / weights.sum(-1, keepdim=True) @ v, 1e-10)


def test_retnet_and_tnl():
    """RetNet (Sun et al., 2023) and TNL (Qin et al., 2023): y_t = q_t sum_j gamma_h^(t - j) k_j v_j'."""
    q, k, v = qkv()
    gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    expected = (q @ k.mT * (gamma[:, None, None] ** distance).tril()) @ v
    assert_close(eos_elementwise(v, k, q, log_o_k=gamma.log()[:, None]), expected, 1e-10)


def test_rwkv4():
    """RWKV-4 (Peng et al., 2023): a weighted mean of values with decay w, and a bonus u for the current token."""
    k, v, r, w, u = randn(B, T, D), randn(B, T, D), randn(B, T, D), rand(D), randn(D)
    top, bottom, expected = torch.zeros(B, D, dtype=torch.float64), torch.zeros(B, D, dtype=torch.float64), []
    for t in range(T):
        now = (u + k[:, t]).exp()
        expected.append(r[:, t].sigmoid() * (top + now * v[:, t]) / (bottom + now))
        top, bottom = (-w).exp() * top + k[:, t].exp() * v[:, t], (-w).exp() * bottom + k[:, t].exp()
    # A head of memory 1 x 2 for each channel. The memory after t holds e^k (v, 1), to which the bonus adds.
    i = torch.stack([v, torch.ones_like(v)], -1).transpose(1, 2)                              # (B, D heads, T, 2)
    e = k.exp().transpose(1, 2).unsqueeze(-1)
    shifted = F.pad(eos_elementwise(i, e, torch.ones_like(e), log_o_k=-w[:, None])[:, :, :-1], (0, 0, 1, 0))
    both = shifted + (u + k).exp().transpose(1, 2).unsqueeze(-1) * i
    y = (both[..., 0] / both[..., 1]).transpose(1, 2) * r.sigmoid()
    assert_close(y, torch.stack(expected, 1), 1e-10)


def test_cosformer():
    """cosFormer (Qin et al., 2022): relu features, weights cos(theta (t - j)), and the denominator."""
    q, k, v = qkv()
    q, k, theta = q.relu(), k.relu(), math.pi / 2 / T
    distance = torch.arange(T, dtype=torch.float64)[:, None] - torch.arange(T, dtype=torch.float64)
    weights = (q @ k.mT * (theta * distance).cos()).tril()
    expected = weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-6)
    with_one = eos_elementwise(torch.cat([v, torch.ones_like(v[..., :1])], -1), k, q,
                               theta=torch.full((H, 1), theta, dtype=torch.float64))
    assert_close(with_one[..., :-1] / with_one[..., -1:].clamp(min=1e-6), expected, 1e-10)


def test_lrpe():
    """LRPE (Qin et al., 2023): each channel pair turns with the position: q_t' Re(e^{i theta (t - j)}) k_j."""
    q, k, v = qkv()
    theta = 10000.0 ** (-2 * torch.arange(K, dtype=torch.float64) / K)
    distance = torch.arange(T, dtype=torch.float64)[:, None] - torch.arange(T, dtype=torch.float64)
    weights = torch.einsum('bhtk,bhjk,tjk->bhtj', q, k, (distance[..., None] * theta).cos()).tril()
    assert_close(eos_elementwise(v, k, q, theta=theta.expand(H, K)), weights @ v, 1e-10)


def test_gla():
    """Gated linear attention (Yang et al., 2023): S_t = diag(g_t) S_{t-1} + k_t v_t'."""
    q, k, v = qkv()
    g, state, expected = randn(B, H, T, K).sigmoid(), torch.zeros(B, H, K, D, dtype=torch.float64), []
    for t in range(T):
        state = torch.diag_embed(g[:, :, t]) @ state + torch.einsum('bhk,bhd->bhkd', k[:, :, t], v[:, :, t])
        expected.append(torch.einsum('bhk,bhkd->bhd', q[:, :, t], state))
    assert_close(eos_elementwise(v, k, q, log_o_k=g.log()), stacked(expected), 1e-10)


def test_gateloop():
    """GateLoop (Katsch, 2023): complex gates a_t of modulus below 1; the output is the real part."""
    q, k, v = qkv()
    size, angle = randn(B, H, T, K).sigmoid(), randn(B, H, T, K)
    state, expected = torch.zeros(B, H, K, D, dtype=torch.complex128), []
    for t in range(T):
        state = torch.polar(size, angle)[:, :, t, :, None] * state + k[:, :, t, :, None] * v[:, :, t, None]
        expected.append((q[:, :, t, :, None] * state).sum(-2).real)
    assert_close(eos_elementwise(v, k, q, log_o_k=size.log(), theta=angle), stacked(expected), 1e-10)


def test_gated_fast_weights():
    """DUR and GFW (Mao, 2022): a decay that is an outer product, S_t = (g_t f_t') * S_{t-1} + k_t v_t'."""
    q, k, v = qkv()
    g, f = randn(B, H, T, K).sigmoid(), randn(B, H, T, D).sigmoid()
    state, expected = torch.zeros(B, H, K, D, dtype=torch.float64), []
    for t in range(T):
        state = torch.einsum('bhk,bhd->bhkd', g[:, :, t], f[:, :, t]) * state + k[:, :, t, :, None] * v[:, :, t, None]
        expected.append((q[:, :, t, None] @ state)[:, :, 0])
    assert_close(eos_elementwise(v, k, q, log_o_k=g.log(), log_o_d=f.log()), stacked(expected), 1e-10)


def test_hgrn_and_lrn():
    """HGRN (Qin et al., 2023) and LRN: h_t = f_t h_{t-1} + (1 - f_t) c_t, y_t = o_t h_t for each channel."""
    c, f, gate = randn(B, T, D), randn(B, T, D).sigmoid(), randn(B, T, D).sigmoid()
    h, expected = torch.zeros(B, D, dtype=torch.float64), []
    for t in range(T):
        h = f[:, t] * h + (1 - f[:, t]) * c[:, t]
        expected.append(gate[:, t] * h)
    ones = torch.ones(B, 1, T, 1, dtype=torch.float64)
    y = gate * eos_elementwise(((1 - f) * c)[:, None], ones, ones, log_o_d=f.log()[:, None])[:, 0]
    assert_close(y, torch.stack(expected, 1), 1e-10)


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

def _deltas(q, k, v, matrix, keys):
    state, outputs = torch.zeros(B, H, K, D, dtype=torch.float64), []
    for t in range(T):
        state = matrix[:, :, t] @ state + keys[:, :, t, :, None] * v[:, :, t, None]
        outputs.append((q[:, :, t, None] @ state)[:, :, 0])
    return stacked(outputs)


def test_fast_weight_programming():
    """DeltaNet (Schlag et al., 2021): the memory's old answer to k_t is replaced by v_t, at the rate beta_t."""
    q, k, v = qkv()
    k, beta = F.normalize(k, dim=-1), rand(B, H, T, 1)
    state, expected = torch.zeros(B, H, D, K, dtype=torch.float64), []
    for t in range(T):
        old = (state @ k[:, :, t, :, None])[..., 0]
        state = state + torch.einsum('bhd,bhk->bhdk', beta[:, :, t] * (v[:, :, t] - old), k[:, :, t])
        expected.append((state @ q[:, :, t, :, None])[..., 0])
    assert_close(eos_matmul(v, beta * k, q, a=k, b=-beta * k), stacked(expected), 1e-10)


def test_m1():
    """M1 of the paper: o = I - k k', with normalized keys a projection; eigenvalues of longer keys are below -1."""
    q, k, v = qkv()
    assert (1 - k.square().sum(-1)).min() < -1.3
    k = F.normalize(k, dim=-1)
    eye = torch.eye(K, dtype=torch.float64)
    expected = _deltas(q, k, v, eye - k[..., :, None] * k[..., None, :], k)
    assert_close(eos_matmul(v, k, q, a=k, b=-k), expected, 1e-10)


def test_m2():
    """M2: o = I - k f' with a free f."""
    q, k, v = qkv()
    k, f = F.normalize(k, dim=-1), F.normalize(randn(B, H, T, K), dim=-1)
    eye = torch.eye(K, dtype=torch.float64)
    expected = _deltas(q, k, v, eye - k[..., :, None] * f[..., None, :], k)
    assert_close(eos_matmul(v, k, q, a=f, b=-k), expected, 1e-10)


def test_m3():
    """M3: o = I - Diag(k) with k in (0, 1) is diagonal, and so GLA with the gate 1 - k."""
    q, k, v = qkv()
    k = k.sigmoid()
    expected = _deltas(q, k, v, torch.diag_embed(1 - k), k)
    assert_close(eos_elementwise(v, k, q, log_o_k=(1 - k).log()), expected, 1e-10)


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


def test_cumulative_softmax():
    """Type 12, of the published code only: o_t = exp(c_{t-1} - c_t), c = logcumsumexp(z), and e times 1 - o.

    The rows of the memory are means of e v over all tokens so far, weighted by exp(z)."""
    (q, k, v), z = qkv(), 5 * randn(B, H, T, K)
    c = torch.logcumsumexp(z, 2)
    log = F.pad(c[:, :, :-1] - c[:, :, 1:], (0, 0, 1, 0), value=-torch.inf)
    expected = []
    for t in range(T):
        weights = z[:, :, :t + 1].softmax(2) * k[:, :, :t + 1]
        expected.append((q[:, :, t, None] @ (weights.mT @ v[:, :, :t + 1]))[:, :, 0])
    assert_close(eos_elementwise(v, -torch.expm1(log) * k, q, log_o_k=log), stacked(expected), 1e-10)
