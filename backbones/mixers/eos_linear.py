"""Recurrences of linear attention for `EosMixer`: expand and shrink states, and oscillations."""
import math
from typing import Any, Callable, Dict, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import eos_elementwise, eos_matmul
from ...kernels.common.numerics import without_autocast
from ...kernels.eos_scan import DecayGenerator

Tokens = Dict[str, Tensor]
_LOGIT_BOUND = 10.0         # of the logits whose running sum is oscillation 12, as in the published code
_SHORTEST = 1e-12           # length below which a vector is not scaled to length 1
# The first token of a line has no predecessor. The operators clamp step logs at this value.
_FORGET = -80.0


def at_least_float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def wide(device=None, dtype=None) -> Dict[str, Any]:
    """Return factory arguments for parameters of a `WideModule`: the dtype is at least float32."""
    return {'device': device, 'dtype': torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)}


class WideModule(nn.Module):
    """A module whose own parameters and buffers stay in float32 when a model is converted to float16 or bfloat16.

    A rate or an angle acts again at each token, so that its rounding error grows with the length of the line. The
    modules inside, such as linear layers, are converted as usual. A conversion to float64 converts all.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> 'WideModule':
        # PyTorch calls this method for half(), to(), cuda() and the like, with the conversion of one tensor.
        def convert(x: Tensor) -> Tensor:
            y = fn(x)
            return at_least_float(x).to(y.device) if y.is_floating_point() and y.dtype.itemsize < 4 else y

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(convert, recurse=False)


def _same(x: Tensor) -> Tensor:
    return x


def _elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


# Activations of the expand and shrink states, by the numbers of `eos_codes.ACTIVATIONS`. Models keep them as
# attributes, so they are named functions: lambdas cannot be pickled.
ACTIVATE: Dict[int, Callable[[Tensor], Tensor]] = {
    0: _same,
    1: F.relu,
    2: torch.sigmoid,
    3: _elu_plus_one,
    4: F.silu,
    5: F.elu,
    6: _squared_relu,
    7: torch.square,
}


class Sizes(NamedTuple):
    """Sizes of a recurrence: heads of `keys` x `width` memories, the width of an input, and the temperature."""

    heads: int
    keys: int
    width: int
    tau: float = 16.0

    @property
    def dim(self) -> int:
        return self.heads * self.width


class Recurrence(WideModule):
    """A recurrence over lines of tokens. Parameters do not depend on the lines' length.

    Attributes:
        fades: False if a memory keeps the full weight of all tokens, so that results grow with the line's length.
        has_decay: True if memories decay by a factor for each token, which `decay_scale` changes.
        decay_scale: step logs are divided by this. State space models divide their steps, and so their angles too.
        ignores_zeros: True if zeros at the start or at the end of a line do not change the results of its other tokens.
    """

    fades = True
    has_decay = True
    decay_scale = 1.0
    ignores_zeros = True

    def tokens(self, x: Tensor) -> Tokens:
        """Return what the recurrence needs of each token x (..., C): tensors (..., heads * channels)."""
        raise NotImplementedError

    def scan(self, i: Tensor, tokens: Tokens, **run: Any) -> Tensor:
        """Run over lines.

        Args:
            i: inputs, (B, heads, T, D).
            tokens: those of `tokens` as (B, heads, T, channels).
            run: options of the operators: bidirectional, reverse, backend.

        Returns:
            A tensor of the shape and dtype of i.
        """
        raise NotImplementedError

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        """Return the step logs of the oscillation, as arguments of `eos_elementwise`: log_o_k, log_o, generator, ...

        Args:
            tokens: as for `scan`.

        Raises:
            ValueError: no decay belongs to a token; the message says why.
        """
        raise NotImplementedError

    def per_scale(self, x: Tensor) -> Tensor:
        """Divide step logs or steps by the decay scale."""
        return x if self.decay_scale == 1 else x / self.decay_scale


def gate_log(z: Tensor, tau: float) -> Tensor:
    """Return log sigmoid(z)^(1/tau), at least float32."""
    return F.logsigmoid(at_least_float(z)) / tau


def unit(x: Tensor) -> Tensor:
    """Return x divided by its length along the last axis. Runtimes of phones have no operator for the length."""
    return x * (x.square().sum(-1, keepdim=True) + _SHORTEST ** 2).rsqrt()


def slopes(heads: int) -> Tensor:
    """Return the slopes of ALiBi, 2^(-8/heads) ... 2^-8: (heads,)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)


class Oscillation(WideModule):
    """The oscillation of an elementwise recurrence. This one is 1."""

    fades = False

    def tokens(self, x: Tensor) -> Tokens:
        return {}

    def arguments(self, tokens: Tokens, length: int) -> Dict[str, Any]:
        """Return arguments of `eos_elementwise` for lines of a length."""
        return {}


class Constant(Oscillation):
    """sigmoid(decay)^(1/tau) with a parameter `decay` (types 0, 4 and 5), or exp(-slope) of the head if not learned."""

    fades = True
    SHAPES = {0: ('log_o', 'kd'), 4: ('log_o_k', 'k'), 5: ('log_o_d', 'd')}

    def __init__(self, number: int, sizes: Sizes, learned: bool, device=None, dtype=None):
        super().__init__()
        self.argument, axes = self.SHAPES[number]
        self.tau = sizes.tau
        shape = [sizes.heads, *({'k': sizes.keys, 'd': sizes.width}[axis] for axis in axes)]
        if learned:
            self.decay = nn.Parameter(torch.empty(shape, **wide(device, dtype)))
            nn.init.normal_(self.decay)
        else:
            self.decay = None
            logs = -slopes(sizes.heads).to(**wide(device, dtype))
            logs = logs.reshape(-1, *[1] * len(axes)).expand(shape).contiguous()
            self.register_buffer('log', logs, persistent=False)

    def arguments(self, tokens: Tokens, length: int) -> Dict[str, Any]:
        return {self.argument: at_least_float(self.log) if self.decay is None else gate_log(self.decay, self.tau)}


class FixedDecay(Oscillation):
    """One fixed decay for each head."""

    fades = True

    def __init__(self, logs: Tensor, device=None, dtype=None):
        super().__init__()
        self.register_buffer('log', logs.to(**wide(device, dtype))[:, None], persistent=False)

    def arguments(self, tokens: Tokens, length: int) -> Dict[str, Any]:
        return {'log_o_k': at_least_float(self.log)}


class TokenGates(Oscillation):
    """sigmoid(W x)^(1/tau) for the keys, the channels of the value, or both (types 1, 2 and 3)."""

    fades = True
    AXES = {1: 'kd', 2: 'd', 3: 'k'}

    def __init__(self, number: int, sizes: Sizes, **dd: Any):
        super().__init__()
        self.tau, axes = sizes.tau, self.AXES[number]
        self.gate_k = nn.Linear(sizes.dim, sizes.heads * sizes.keys, **dd) if 'k' in axes else None
        self.gate_d = nn.Linear(sizes.dim, sizes.dim, **dd) if 'd' in axes else None

    def tokens(self, x: Tensor) -> Tokens:
        gates = {'log_o_k': self.gate_k, 'log_o_d': self.gate_d}
        return {name: gate_log(gate(x), self.tau)
                for name, gate in gates.items() if gate is not None}

    def arguments(self, tokens: Tokens, length: int) -> Dict[str, Any]:
        return {name: tokens[name] for name in ('log_o_k', 'log_o_d') if name in tokens}


class GatedProduct(Oscillation):
    """sigmoid(z weight)^(1/tau) with z = W x and a parameter (types 6 to 9), which has full rank."""

    fades = True
    # Axis of z, axes of the weight.
    AXES = {6: ('k', 'kd'), 7: ('d', 'kd'), 8: ('d', 'k'), 9: ('k', 'd')}

    def __init__(self, number: int, sizes: Sizes, **dd: Any):
        super().__init__()
        self.axis, axes = self.AXES[number]
        self.tau = sizes.tau
        count = sizes.keys if self.axis == 'k' else sizes.width
        self.z = nn.Linear(sizes.dim, sizes.heads * count, **dd)
        shape = (sizes.heads, sizes.keys if 'k' in axes else 1, sizes.width if 'd' in axes else 1)
        self.factor = nn.Parameter(torch.empty(shape, **wide(**dd)))
        nn.init.normal_(self.factor)

    def tokens(self, x: Tensor) -> Tokens:
        return {'z': at_least_float(self.z(x))}

    def arguments(self, tokens: Tokens, length: int) -> Dict[str, Any]:
        factor = self.factor.to(tokens['z'].dtype)
        return {'generator': DecayGenerator(tokens['z'], factor, self.axis, 'sigmoid', self.tau)}


class Phases(Oscillation):
    """e^(i theta) with theta_k = 10000^(-2k/K), fixed (type 11) or learned (LRPE)."""

    def __init__(self, sizes: Sizes, learned: bool, device=None, dtype=None):
        super().__init__()
        angles = 10000.0 ** (-2.0 * torch.arange(sizes.keys, dtype=torch.float64) / sizes.keys)
        angles = angles.expand(sizes.heads, -1).to(**wide(device, dtype)).clone()
        if learned:
            self.theta = nn.Parameter(angles)
        else:
            self.register_buffer('theta', angles, persistent=False)

    def arguments(self, tokens: Tokens, length: int) -> Dict[str, Any]:
        return {'theta': at_least_float(self.theta)}


class QuarterTurn(Oscillation):
    """e^(i pi / 2 T) on a line of T tokens, with which the real part never changes its sign (cosFormer)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads = sizes.heads

    def arguments(self, tokens: Tokens, length: int) -> Dict[str, Any]:
        like = tokens['s']
        return {'theta': torch.full((self.heads, 1), math.pi / 2 / length, device=like.device,
                                    dtype=at_least_float(like[:0]).dtype)}


class TurningGates(Oscillation):
    """sigmoid(W x)^(1/tau) e^(i U x) for the keys (GateLoop)."""

    fades = True

    def __init__(self, sizes: Sizes, **dd: Any):
        super().__init__()
        self.tau = sizes.tau
        self.gate_k, self.angle = (nn.Linear(sizes.dim, sizes.heads * sizes.keys, **dd) for _ in range(2))

    def tokens(self, x: Tensor) -> Tokens:
        return {'log_o_k': gate_log(self.gate_k(x), self.tau), 'theta': at_least_float(self.angle(x))}

    def arguments(self, tokens: Tokens, length: int) -> Dict[str, Any]:
        return {name: tokens[name] for name in ('log_o_k', 'theta')}


class Elementwise(Recurrence):
    """m_t = o_t * m_{t-1} + e_t i_t', y_t = m_t' s_t with expand and shrink states of the token or learned.

    Args:
        sizes: sizes.
        oscillation: the module that computes o.
        activation: number of the activation of e and s, see `eos_codes.ACTIVATIONS`.
        expand, shrink: 1 for a linear map of the token, 0 for a learned matrix (K, D) that multiplies the memory.
        normalized: divide by the sum of the weights.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(self, sizes: Sizes, oscillation: Oscillation, activation: int = 0, expand: int = 1, shrink: int = 1,
                 normalized: bool = False, **dd: Any):
        super().__init__()
        self.activate, self.normalized, self.oscillation = ACTIVATE[activation], normalized, oscillation
        self.fades = self.has_decay = oscillation.fades
        if normalized:
            self.ignores_zeros = False                   # the sum of weights counts all tokens
        self.expand, self.shrink = (nn.Linear(sizes.dim, sizes.heads * sizes.keys, **dd) if given else None
                                    for given in (expand, shrink))
        self.expand_matrix, self.shrink_matrix = (
            None if given else nn.Parameter(torch.empty(sizes.heads, sizes.keys, sizes.width, **wide(**dd)))
            for given in (expand, shrink))
        for matrix in (self.expand_matrix, self.shrink_matrix):
            if matrix is not None:
                nn.init.normal_(matrix, std=0.1)

    def tokens(self, x: Tensor) -> Tokens:
        found = {}
        if self.expand is not None:
            found['e'] = self.activate(self.expand(x))
        if self.shrink is not None:
            found['s'] = self.activate(self.shrink(x))
        return {**found, **self.oscillation.tokens(x)}

    def scan(self, i: Tensor, tokens: Tokens, **run: Any) -> Tensor:
        e = tokens['e'] if self.expand_matrix is None else self.activate(self.expand_matrix)
        s = tokens['s'] if self.shrink_matrix is None else self.activate(self.shrink_matrix)
        options = {**self._arguments(tokens, i.shape[2]), **run}
        if not self.normalized:
            return eos_elementwise(i, e.to(i.dtype), s.to(i.dtype), **options)
        values = at_least_float(torch.cat([i, torch.ones_like(i[..., :1])], -1))
        y = eos_elementwise(values, e.to(values.dtype), s.to(values.dtype), **options)
        return (y[..., :-1] / y[..., -1:].clamp(min=1e-6)).to(i.dtype)

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        found = {name: x for name, x in self._arguments(tokens, 1).items() if name != 'theta'}
        if not found:
            raise ValueError('its oscillation has the absolute value 1')
        return found

    def _arguments(self, tokens: Tokens, length: int) -> Dict[str, Any]:
        """Return the arguments of the oscillation for lines of a length, with decays divided by the scale."""
        given = self.oscillation.arguments(tokens, length)
        if self.decay_scale == 1:
            return given
        if 'generator' in given:                         # log sigmoid(u) / tau
            generator = given['generator']
            return {**given, 'generator': generator._replace(tau=generator.tau * self.decay_scale)}
        return {name: x if name == 'theta' else self.per_scale(x) for name, x in given.items()}


class ComplementKeys(Recurrence):
    """M3: o = I - Diag(k) with k = 1 - sigmoid(W x)^(1/tau), which is diagonal."""

    def __init__(self, sizes: Sizes, **dd: Any):
        super().__init__()
        self.tau = sizes.tau
        self.gate_k, self.shrink = (nn.Linear(sizes.dim, sizes.heads * sizes.keys, **dd) for _ in range(2))

    def tokens(self, x: Tensor) -> Tokens:
        log = self.per_scale(gate_log(self.gate_k(x), self.tau))
        return {'log_o_k': log, 'e': -torch.expm1(log), 's': self.shrink(x)}

    def scan(self, i: Tensor, tokens: Tokens, **run: Any) -> Tensor:
        return eos_elementwise(i, tokens['e'].to(i.dtype), tokens['s'].to(i.dtype), **self.decays(tokens), **run)

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        return {'log_o_k': tokens['log_o_k']}


class RunningSoftmax(Elementwise):
    """Oscillation 12 of the published code: the memory is a mean of all values so far, weighted by exp(W x).

    o_t = exp(c_{t-1} - c_t) with the running sums exp(c_t) of exp(W x), and the expand state is multiplied by 1 - o_t.
    The sums of the two directions differ, and so do their terms of t itself: both directions take their mean.
    """

    ignores_zeros = False                                # the running sums count all tokens

    def __init__(self, sizes: Sizes, activation: int, shrink: int, **dd: Any):
        super().__init__(sizes, Oscillation(), activation, 1, shrink, **dd)
        self.logit = nn.Linear(sizes.dim, sizes.heads * sizes.keys, **dd)

    def tokens(self, x: Tensor) -> Tokens:
        return {**super().tokens(x), 'logit': at_least_float(self.logit(x)).clamp(-_LOGIT_BOUND, _LOGIT_BOUND)}

    def scan(self, i: Tensor, tokens: Tokens, bidirectional: bool = False, reverse: bool = False, **run: Any) -> Tensor:
        y, own = zip(*(self._pass(i, tokens, back, **run)
                       for back in ((False, True) if bidirectional else (reverse,))))
        return y[0] + y[1] - (own[0] + own[1]) / 2 if bidirectional else y[0]

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        raise ValueError('its oscillation depends on all tokens between the start of the line and a token')

    def _pass(self, i: Tensor, tokens: Tokens, reverse: bool, **run: Any):
        """Return the output of one direction, and the part of it that is each token's own."""
        weights = tokens['logit'].exp()
        sums = weights.flip(2).cumsum(2).flip(2) if reverse else weights.cumsum(2)
        log = sums.log()
        steps = (log[:, :, 1:] - log[:, :, :-1] if reverse else log[:, :, :-1] - log[:, :, 1:]).clamp(max=0)
        steps = F.pad(steps, (0, 0, 0, 1) if reverse else (0, 0, 1, 0), value=_FORGET)
        e = (tokens['e'] * (weights / sums)).to(i.dtype)
        s = (tokens['s'] if self.shrink_matrix is None else self.activate(self.shrink_matrix)).to(i.dtype)
        y = eos_elementwise(i, e, s, log_o_k=steps, reverse=reverse, **run)
        if s.ndim == 3:
            return y, i * (e @ s)
        return y, i * (e * s).sum(-1, keepdim=True)


class Delta(Recurrence):
    """m_t = (I - beta_t k_t f_t') m_{t-1} + beta_t k_t i_t' with keys and queries of length 1 (DeltaNet, M1, M2).

    Args:
        sizes: sizes.
        rate: beta = sigmoid(W x) for each head; without, 1.
        second_key: f is another key; without, f = k.
        device, dtype: device and dtype of the parameters.
    """

    has_decay = False

    def __init__(self, sizes: Sizes, rate: bool, second_key: bool, **dd: Any):
        super().__init__()
        self.heads = sizes.heads
        self.key, self.query = (nn.Linear(sizes.dim, sizes.heads * sizes.keys, **dd) for _ in range(2))
        self.second_key = nn.Linear(sizes.dim, sizes.heads * sizes.keys, **dd) if second_key else None
        self.rate = nn.Linear(sizes.dim, sizes.heads, **dd) if rate else None

    def tokens(self, x: Tensor) -> Tokens:
        found: Dict[str, Optional[nn.Module]] = dict(key=self.key, query=self.query, second=self.second_key,
                                                     rate=self.rate)
        return {name: layer(x) for name, layer in found.items() if layer is not None}

    def scan(self, i: Tensor, tokens: Tokens, **run: Any) -> Tensor:
        with without_autocast(i):
            units = {name: unit(F.silu(at_least_float(x))) for name, x in tokens.items() if name != 'rate'}
            key = units['key']
            e = key * at_least_float(tokens['rate']).sigmoid() if self.rate is not None else key
            e, s, a, b = (x.to(i.dtype) for x in (e, units['query'], units.get('second', key), -e))
        return eos_matmul(i, e, s, a=a, b=b, **run)

    def decays(self, tokens: Tokens) -> Dict[str, Any]:
        raise ValueError('its oscillation is a matrix, which erases the value of one key instead of fading all')
