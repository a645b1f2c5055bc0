"""State space models and recurrences of single channels for `EosMixer`: S4, S5, DSS, TNN, Mamba, RWKV-4 and HGRN."""
import math
from typing import Any, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import eos_elementwise
from ...kernels.common.numerics import without_autocast
from ...kernels.eos_scan import DecayGenerator
from ...kernels.eos_scan.problem import phases
from .eos_linear import ACTIVATE, Recurrence, Sizes, Tokens, at_least_float, gate_log, wide
from .scan import hippo_normal_eigenvalues

# Range of initial steps, and the rank of Mamba's map from tokens to steps.
_STEPS = (1e-3, 1e-1)
_STEP_RANK = 16


def _modes(kind: str, keys: int) -> Tensor:
    """Return initial eigenvalues, complex (keys,)."""
    if kind == 's4d':                                                         # S4D-Lin
        return torch.complex(torch.full((keys,), -0.5, dtype=torch.float32), math.pi * torch.arange(keys).float())
    return hippo_normal_eigenvalues(keys)


def _log_steps(shape, **dd: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **dd).uniform_(*(math.log(step) for step in _STEPS)))


def _product(real: Tensor, imaginary: Tensor, cos: Tensor, sin: Tensor) -> Tuple[Tensor, Tensor]:
    """Multiply two complex numbers, given and returned as real and imaginary parts."""
    return real * cos - imaginary * sin, real * sin + imaginary * cos


def _split(x: Tensor) -> Tensor:
    """(B, heads, T, D) -> (B, heads * D, T, 1): a head for each channel."""
    return x.transpose(2, 3).flatten(1, 2).unsqueeze(-1)


def _join(x: Tensor, heads: int) -> Tensor:
    """Invert `_split`."""
    return x.squeeze(-1).unflatten(1, (heads, -1)).transpose(2, 3)


class Modes(Recurrence):
    """A constant diagonal system with complex modes for each channel: y = Re(C m) + skip i (S4, DSS, TNN).

    's4' and 's4d' have a step for each channel, and zero-order hold. 'dss' and 'tnn' have one step for each head; the
    expand state is 1 for DSS, and the shrink state is 1 for TNN.
    """

    def __init__(self, kind: str, sizes: Sizes, **dd: Any):
        super().__init__()
        self.kind, dd = kind, wide(**dd)
        heads, keys, width = sizes[:3]
        own = kind.startswith('s4')
        modes = _modes(kind, keys).to(dd['device'])
        self.log_rate = nn.Parameter((-modes.real).log().expand(heads, -1).to(dd['dtype']).clone())
        self.frequency = nn.Parameter(modes.imag.expand(heads, -1).to(dd['dtype']).clone())
        self.log_step = _log_steps((heads, 1, width) if own else (heads, 1), **dd)
        self.expand_matrix = self.shrink_matrix = None
        if kind != 'dss':
            self.expand_matrix = nn.Parameter(torch.zeros(heads, keys, width, 2, **dd))
            nn.init.ones_(self.expand_matrix[..., 0])
        if kind != 'tnn':
            self.shrink_matrix = nn.Parameter(torch.empty(heads, keys, width, 2, **dd))
            nn.init.normal_(self.shrink_matrix, std=math.sqrt(0.5))
        self.skip = nn.Parameter(torch.ones(heads, 1, width, **dd))

    def tokens(self, x: Tensor) -> Tokens:
        return {}

    def scan(self, i: Tensor, tokens: Tokens, **run: Any) -> Tensor:
        values = at_least_float(i)
        dtype = values.dtype
        with without_autocast(i):
            step, rate, frequency = self._constants(dtype)
            matrices = (self.expand_matrix, self.shrink_matrix)
            e, s = (None if x is None else torch.view_as_complex(x.to(dtype).contiguous()) for x in matrices)
            log, theta = -rate * step, frequency * step
            if self.kind.startswith('s4'):
                decay = torch.polar(log.exp(), theta)
                e = e * (decay - 1) / torch.complex(-rate, frequency)         # zero-order hold
            ones = values.new_ones(log.shape[0], log.shape[1], i.shape[3])
            e, s = (ones if x is None else x for x in (e, s))
            y = eos_elementwise(values, e, s, theta=theta, **_step_logs(log), **run)
            return (y + self.skip.to(dtype) * values).to(i.dtype)

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        step, rate, _ = self._constants(at_least_float(self.log_rate).dtype)
        return _step_logs(-rate * step)

    def _constants(self, dtype: torch.dtype) -> Tuple[Tensor, Tensor, Tensor]:
        """Return steps, rates and frequencies that broadcast to (heads, keys) or (heads, keys, D)."""
        step, rate, frequency = (x.to(dtype) for x in (self.log_step, self.log_rate, self.frequency))
        if step.ndim == 3:
            rate, frequency = rate.unsqueeze(-1), frequency.unsqueeze(-1)
        return self.per_scale(step.exp()), rate.exp(), frequency


def _step_logs(log: Tensor) -> Dict[str, Tensor]:
    """Return constant step logs (heads, keys) or (heads, keys, D) as an argument of `eos_elementwise`."""
    return {'log_o' if log.ndim == 3 else 'log_o_k': log}


class System(Recurrence):
    """S5: x_t = diag(lambda) x_{t-1} + B i_t, y_t = Re(C x_t) + skip i_t, one system for all channels of all heads.

    A mode is a head of the operator, with a memory of two real numbers: the state x_t turns at a constant rate, and in
    a frame that turns with it, its real and imaginary parts decay on their own.
    """

    def __init__(self, sizes: Sizes, **dd: Any):
        super().__init__()
        count, dim, dd = sizes.heads * sizes.keys, sizes.dim, wide(**dd)
        modes = hippo_normal_eigenvalues(count).to(dd['device'])
        self.heads = sizes.heads
        self.log_rate = nn.Parameter((-modes.real).log().to(dd['dtype']))
        self.frequency = nn.Parameter(modes.imag.to(dd['dtype']))
        self.log_step = _log_steps(count, **dd)
        self.input_matrix = nn.Parameter(torch.empty(2 * count, dim, **dd))
        self.output_matrix = nn.Parameter(torch.empty(dim, 2 * count, **dd))
        nn.init.normal_(self.input_matrix, std=dim ** -0.5)
        nn.init.normal_(self.output_matrix, std=count ** -0.5)
        self.skip = nn.Parameter(torch.ones(dim, **dd))

    def tokens(self, x: Tensor) -> Tokens:
        return {}

    def scan(self, i: Tensor, tokens: Tokens, bidirectional: bool = False, **run: Any) -> Tensor:
        values = at_least_float(i).transpose(1, 2).flatten(2)                              # (B, T, C)
        dtype = values.dtype
        with without_autocast(i):
            step = self.per_scale(self.log_step.to(dtype).exp())
            rate, frequency = self.log_rate.to(dtype).exp(), self.frequency.to(dtype)
            log, theta = -rate * step, frequency * step
            hold = (torch.polar(log.exp(), theta) - 1) / torch.complex(-rate, frequency)
            added = _product(*F.linear(values, self.input_matrix.to(dtype)).chunk(2, -1), hold.real, hold.imag)
            angle = phases(theta[None], values.shape[1], False)[0, 0]                       # (T, modes)
            cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
            one = torch.ones_like(added[0]).transpose(1, 2).unsqueeze(-1)                  # (B, modes, T, 1)
            parts: List[Tensor] = []
            for reverse in (False, True)[:1 + bidirectional]:
                back, turn = (sin, -sin) if reverse else (-sin, sin)
                turned = torch.stack(_product(*added, cos, back), -1).transpose(1, 2)      # (B, modes, T, 2)
                states = eos_elementwise(turned, one, one, log_o_k=log.unsqueeze(-1), reverse=reverse, **run)
                found = _product(*states.transpose(1, 2).unbind(-1), cos, turn)
                parts = [x + y - z for x, y, z in zip(parts, found, added)] or list(found)
            y = F.linear(torch.cat([parts[0], -parts[1]], -1), self.output_matrix.to(dtype))
            y = y + self.skip.to(dtype) * values
        return y.unflatten(2, (self.heads, -1)).transpose(1, 2).to(i.dtype)

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        """All heads share one memory: one head in the result."""
        return _step_logs(self.per_scale(-at_least_float(self.log_rate + self.log_step).exp()[None]))


class Selective(Recurrence):
    """Mamba: delta = softplus(W2 W1 x + bias), i = delta v, o = exp(-delta A), y = C m + skip v."""

    def __init__(self, sizes: Sizes, activation: int = 0, **dd: Any):
        super().__init__()
        heads, keys, width = sizes[:3]
        self.activate = ACTIVATE[activation]
        self.expand, self.shrink = (nn.Linear(sizes.dim, heads * keys, bias=False, **dd) for _ in range(2))
        self.step = nn.Sequential(nn.Linear(sizes.dim, _STEP_RANK, bias=False, **dd),
                                  nn.Linear(_STEP_RANK, sizes.dim, bias=False, **dd))
        own = wide(**dd)
        step = torch.empty(sizes.dim, **own).uniform_(*(math.log(step) for step in _STEPS)).exp()
        self.step_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))               # the inverse of softplus
        rates = torch.arange(1, keys + 1, dtype=torch.float32)[:, None].expand(heads, keys, width).log()
        self.A_log = nn.Parameter(rates.to(**own).clone())
        self.skip = nn.Parameter(torch.ones(heads, 1, width, **own))

    def tokens(self, x: Tensor) -> Tokens:
        step = self.per_scale(F.softplus(at_least_float(self.step(x)) + self.step_bias))
        return {'e': self.activate(self.expand(x)), 's': self.activate(self.shrink(x)), 'step': step}

    def scan(self, i: Tensor, tokens: Tokens, **run: Any) -> Tensor:
        y = eos_elementwise((i * tokens['step']).to(i.dtype), tokens['e'].to(i.dtype), tokens['s'].to(i.dtype),
                            **self.decays(tokens), **run)
        return y + self.skip.to(i.dtype) * i

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        step = tokens['step']
        return {'generator': DecayGenerator(step, self.A_log.to(step.dtype).exp(), 'd', 'exponential')}


class WeightedMean(Recurrence):
    """RWKV-4: sigmoid(r) times the mean of all values with weights exp(k_j - w (distance - 1)), and exp(u + k_t) for t.

    The memory of a channel is (sum of weighted values, sum of weights). Subtracting the largest key of a line leaves
    the quotient as it is. A key more than 60 below it counts as 60 below it, so that no denominator is 0.
    """

    ignores_zeros = False                                # the sum of weights counts all tokens

    def __init__(self, sizes: Sizes, device=None, dtype=None):
        super().__init__()
        dd, own = {'device': device, 'dtype': dtype}, wide(device, dtype)
        self.heads = sizes.heads
        self.key, self.receptance = (nn.Linear(sizes.dim, sizes.dim, **dd) for _ in range(2))
        self.log_rate = nn.Parameter(torch.linspace(-5, 0, sizes.dim, **own))
        self.bonus = nn.Parameter(torch.full((sizes.dim,), math.log(0.3), **own))

    def tokens(self, x: Tensor) -> Tokens:
        return {'key': self.key(x), 'receptance': self.receptance(x)}

    def scan(self, i: Tensor, tokens: Tokens, bidirectional: bool = False, **run: Any) -> Tensor:
        values, key = _split(at_least_float(i)), _split(at_least_float(tokens['key']))
        rate = self.per_scale(self.log_rate.to(key.dtype).exp().unsqueeze(-1))             # (C, 1)
        e = (key - key.amax(2, keepdim=True).detach()).clamp(min=-60).exp()
        values = torch.cat([values, torch.ones_like(values)], -1)
        sums = self.bonus.to(key.dtype).exp().reshape(-1, 1, 1) * e * values               # the token itself
        for reverse in (False, True)[:1 + bidirectional]:
            # Memories of the neighbor. Subtracting a token from its own memory would lose all digits of fast decays.
            memories = eos_elementwise(values, e, torch.ones_like(e), log_o_k=-rate, reverse=reverse, **run)
            none = torch.zeros_like(memories[:, :, :1])
            parts = (memories[:, :, 1:], none) if reverse else (none, memories[:, :, :-1])
            sums = sums + torch.cat(parts, 2)
        y = _join(sums[..., :1] / sums[..., 1:], self.heads)
        return y.to(i.dtype) * tokens['receptance'].sigmoid().to(i.dtype)

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        return {'log_o_d': self.per_scale(-at_least_float(self.log_rate).exp().unflatten(0, (self.heads, -1)))}


class GatedChannels(Recurrence):
    """HGRN, LRN: m_t = f_t e^{i theta} m_{t-1} + (1 - f_t) i_t, y = sigmoid(V x) Re(m_t), f = sigmoid(W x)^(1/tau)."""

    def __init__(self, sizes: Sizes, turning: bool, device=None, dtype=None):
        super().__init__()
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        self.heads, self.tau = sizes.heads, sizes.tau
        self.forget, self.shrink = (nn.Linear(sizes.dim, sizes.dim, **dd) for _ in range(2))
        angles = 10000.0 ** (-torch.arange(sizes.dim, dtype=torch.float32, device=device) / sizes.dim)
        self.theta = nn.Parameter(angles.to(**wide(device, dtype))) if turning else None

    def tokens(self, x: Tensor) -> Tokens:
        return {'log': self.per_scale(gate_log(self.forget(x), self.tau)), 'shrink': self.shrink(x)}

    def scan(self, i: Tensor, tokens: Tokens, **run: Any) -> Tensor:
        log = tokens['log']
        values = -torch.expm1(log) * i
        if self.theta is None:
            ones = i.new_ones(*i.shape[:3], 1)
            y = eos_elementwise(values.to(i.dtype), ones, ones, log_o_d=log, **run)
        else:
            values, log = _split(values), _split(log)
            ones, theta = torch.ones_like(values), self.theta.to(values.dtype).unsqueeze(-1)
            y = _join(eos_elementwise(ones, values, ones, log_o_k=log, theta=theta, **run), self.heads).to(i.dtype)
        return y * tokens['shrink'].sigmoid().to(i.dtype)

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        return {'log_o_d': tokens['log']}
