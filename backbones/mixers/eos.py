"""Token mixing by any linear recurrence (LCSM): expand, oscillation and shrink states around one operator.

Qin et al., "Unlocking the Secrets of Linear Complexity Sequence Model from A Unified Perspective", 2024. The paper
describes sequences, over which `EosMixer` runs from the first token to the last. On images it runs in both directions,
over the lines of the grid or over the flattened image.
"""
import warnings
from typing import Annotated, Any, Callable, Dict, Optional

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ..options import Flag, Option, Options, check, checked, integer, one_of, or_none
from . import eos_linear as linear
from . import eos_systems as systems
from .eos_codes import CONSTANT, NUMBERINGS, WITHOUT_KEYS, Code, has_tau, parse, refuse
from .eos_decay import StateDecay, state_decay
from .eos_linear import Recurrence, Sizes

MODES = ('axis', 'raster', 'forward')
TAU, EXPAND_DIM = 16.0, 16
_SIZES: Options = {'dim': integer(1, 65_536), 'num_heads': integer(1, 65_536)}

Build = Callable[..., Recurrence]


def _attention(oscillation: Callable[..., linear.Oscillation], activation: int = 0, normalized: bool = False) -> Build:
    """Return a function of sizes that builds an elementwise recurrence with e and s of the token."""
    def build(sizes: Sizes, **dd: Any) -> Recurrence:
        return linear.Elementwise(sizes, oscillation(sizes, **dd), activation, normalized=normalized, **dd)
    return build


def _retnet(sizes: Sizes, device=None, dtype=None) -> linear.Oscillation:
    return linear.FixedDecay(torch.log1p(-torch.exp2(-5.0 - torch.arange(sizes.heads, dtype=torch.float64))), device,
                              dtype)


def _tnl(sizes: Sizes, device=None, dtype=None) -> linear.Oscillation:
    return linear.FixedDecay(-linear.slopes(sizes.heads), device, dtype)


_DUR = _attention(lambda sizes, **dd: linear.TokenGates(1, sizes, **dd))


def _deltanet(sizes: Sizes, **dd: Any) -> Recurrence:
    return linear.Delta(sizes, rate=True, second_key=False, **dd)


# Preset (see `eos_codes.PRESETS`) -> function of sizes that builds its recurrence.
BUILD: Dict[str, Build] = {
    's4': lambda sizes, **dd: systems.Modes('s4', sizes, **dd),
    's4d': lambda sizes, **dd: systems.Modes('s4d', sizes, **dd),
    's5': systems.System,
    'dss': lambda sizes, **dd: systems.Modes('dss', sizes, **dd),
    'tnn': lambda sizes, **dd: systems.Modes('tnn', sizes, **dd),
    'mamba': systems.Selective,
    'linear_attention': _attention(lambda sizes, **dd: linear.Oscillation(), 3),
    'cosformer': _attention(lambda sizes, **dd: linear.QuarterTurn(sizes), 1, normalized=True),
    'lrpe': _attention(lambda sizes, **dd: linear.Phases(sizes, True, **dd), 3),
    'retnet': _attention(_retnet),
    'tnl': _attention(_tnl, 4),
    'gla': _attention(lambda sizes, **dd: linear.TokenGates(3, sizes, **dd), 4),
    'gateloop': _attention(linear.TurningGates),
    'dur': _DUR,
    'gfw': _DUR,
    'rwkv4': systems.WeightedMean,
    'hgrn': lambda sizes, **dd: systems.GatedChannels(sizes, True, **dd),
    'lrn': lambda sizes, **dd: systems.GatedChannels(sizes, False, **dd),
    'deltanet': _deltanet,
    'fwp': _deltanet,
    'm1': lambda sizes, **dd: linear.Delta(sizes, rate=False, second_key=False, **dd),
    'm2': lambda sizes, **dd: linear.Delta(sizes, rate=False, second_key=True, **dd),
    'm3': linear.ComplementKeys,
}


def _of_code(code: Code, sizes: Sizes, learned: bool, **dd: Any) -> Recurrence:
    """Build the recurrence of a code."""
    number = code.oscillation
    if not code.linear:
        return systems.Selective(sizes, code.activation, **dd)
    if number == 12:
        return linear.RunningSoftmax(sizes, code.activation, code.shrink, **dd)
    if number in CONSTANT:
        oscillation: linear.Oscillation = linear.Constant(number, sizes, learned, **dd)
    elif number in linear.TokenGates.AXES:
        oscillation = linear.TokenGates(number, sizes, **dd)
    elif number in linear.GatedProduct.AXES:
        oscillation = linear.GatedProduct(number, sizes, **dd)
    else:
        oscillation = linear.Phases(sizes, False, **dd) if number == 11 else linear.Oscillation()
    return linear.Elementwise(sizes, oscillation, code.activation, code.expand, code.shrink, **dd)


def make_recurrence(
        dim: int,
        num_heads: int,
        mixer: str = 'gla',
        expand_dim: Optional[int] = None,
        tau: Optional[float] = None,
        numbering: str = 'code',
        learned_decay: bool = True,
        device=None,
        dtype=None,
) -> Recurrence:
    """Build the recurrence of a preset or code; see `EosMixer` for the arguments.

    Raises:
        ValueError: an argument is not allowed; the message has the table of codes.
    """
    check('EosMixer', _SIZES, {'dim': dim, 'num_heads': num_heads})
    code = parse(mixer, numbering)
    if dim % num_heads:
        refuse(f'dim must be a multiple of num_heads, got dim={dim} and num_heads={num_heads}')
    if tau is not None and not 0 < tau < float('inf'):
        refuse(f'tau must be positive, got {tau!r}')
    if not learned_decay and (code is None or not code.linear or code.oscillation not in CONSTANT):
        learned_decay = True
        warnings.warn(f'learned_decay=False has no effect on mixer={mixer!r}: it is for the oscillations 0, 4 and 5',
                      stacklevel=2)
    if tau is not None and not (has_tau(mixer, code) and learned_decay):
        warnings.warn(f'tau={tau!r} has no effect on mixer={mixer!r}: there is no temperature', stacklevel=2)
        tau = None
    if expand_dim is not None and mixer in WITHOUT_KEYS:
        warnings.warn(f'expand_dim={expand_dim!r} has no effect on mixer={mixer!r}: it has a memory for each channel',
                      stacklevel=2)
        expand_dim = None
    sizes = Sizes(num_heads, expand_dim or EXPAND_DIM, dim // num_heads, TAU if tau is None else float(tau))
    dd = {'device': device, 'dtype': dtype}
    return BUILD[mixer](sizes, **dd) if code is None else _of_code(code, sizes, learned_decay, **dd)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value is not True


@register_notrace_module
class EosMixer(nn.Module):
    """out(SiLU(gate(x)) * LayerNorm(recurrence(value(x)))): (B, H, W, C) -> (B, H, W, C) for any H, W >= 1.

    The recurrence runs in both directions, which share all parameters, and counts the term of the token itself once.
    With mode='forward' it runs from the first token to the last, so that no token depends on a later one.

    In a model that is converted to float16 or bfloat16, rates, angles and other parameters of the recurrence that
    belong to no linear layer stay in float32. In float16, recurrences over the flattened image, and those whose memory
    does not fade, run in float32, because their sums can exceed the range of float16.

    Args:
        dim: channels C; heads are contiguous slices of C.
        num_heads: number of heads; dim must be a multiple of it.
        mixer: a preset such as 'gla', or a code 'e-o-s-a' or 'p-e-o-s-a' of the paper's Tables 2 and 3 such as
            '1-1-1-6'; an unknown one raises an error that lists all.
        mode: 'axis' runs along the columns, and over the normalized result along the rows, with the same parameters;
            'raster' runs over the flattened image; 'forward' does so in one direction, for sequences (B, 1, T, C).
        expand_dim: keys K of each head's memory K x D; None for 16.
        tau: temperature of oscillations sigmoid(.)^(1/tau), above 0; None for 16. A large one means a long memory.
        numbering: whose numbers of oscillations a code has, the published 'code' or the 'paper'. They differ in 2 to 5;
            for codes with another oscillation, and with the prefix 0, both are the same. Presets take 'code' only.
        learned_decay: False replaces the learned constants of the oscillations 0, 4 and 5 by exp(-slope), with the
            slopes of ALiBi for the heads.
        gated: multiply by SiLU(gate(x)); the paper's layer has no such factor.
        device, dtype: device and dtype of the parameters; those that stay in float32 have at least this dtype.

    Raises:
        ValueError: an argument is not allowed (the message has the table of codes), or an input is not (B, H, W, dim).
    """

    @checked
    def __init__(
            self,
            dim: int,
            num_heads: int,
            mixer: Annotated[str, Option('a string', lambda value: isinstance(value, str))] = 'gla',
            mode: Annotated[str, one_of(*MODES)] = 'axis',
            expand_dim: Annotated[Optional[int], or_none(integer(1, 128))] = None,
            tau: Annotated[Optional[float], or_none(Option('a number', _is_number))] = None,
            numbering: Annotated[str, one_of(*NUMBERINGS)] = 'code',
            learned_decay: Flag = True,
            gated: Flag = True,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.dim, self.num_heads, self.mixer, self.mode = dim, num_heads, mixer, mode
        self.recurrence = make_recurrence(dim, num_heads, mixer, expand_dim, tau, numbering, learned_decay, **dd)
        self.value = nn.Linear(dim, dim, **dd)
        self.gate = nn.Linear(dim, dim, **dd) if gated else None
        self.norm = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.out = nn.Linear(dim, dim, **dd)
        # Sums over an image, or over a line without decay, can exceed the range of float16.
        self.long_sums = mode != 'axis' or not self.recurrence.fades

    @property
    def decay_scale(self) -> float:
        """Step logs are divided by this; `subquad.set_decay_scale` sets it. See `eos_linear.Recurrence`."""
        return self.recurrence.decay_scale

    @decay_scale.setter
    def decay_scale(self, scale: float) -> None:
        self.recurrence.decay_scale = scale

    def why_not_scale(self, scale: float) -> Optional[str]:
        """Return why `decay_scale` cannot be this, or None."""
        if not self.recurrence.has_decay:
            return f'mixer={self.mixer!r} has no decay for each token'
        if self.mode != 'axis':
            return f'with mode={self.mode!r}, a step of one row passes all tokens of a row'
        return None

    @property
    def takes_mask(self) -> bool:
        """True if `forward` takes a padding mask: for recurrences along lines that zeros do not change."""
        return self.mode == 'axis' and self.recurrence.ignores_zeros

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """Mix tokens x (B, H, W, C).

        Args:
            x: tokens (B, H, W, C).
            mask: (B, H, W), true for tokens and false for padding at the right and at the bottom, which does not affect
                the tokens; None for no padding.

        Raises:
            ValueError: the shape is not allowed, or there is a mask although `takes_mask` is False.
        """
        if x.ndim != 4 or x.shape[3] != self.dim or not (x.shape[1] and x.shape[2]):
            raise ValueError(f'x must be (B, H, W, {self.dim}) with H and W >= 1, got {tuple(x.shape)}')
        if mask is not None and not self.takes_mask:
            raise ValueError(f'mixer={self.mixer!r} with mode={self.mode!r} does not take a mask; use '
                             'subquad.exact_padding')
        y = self._normalize(self.mix(self.value(x), x, mask))
        if self.gate is not None:
            y = F.silu(self.gate(x)) * y
        return self.out(y)

    def _normalize(self, y: Tensor) -> Tensor:
        """Apply the norm, in float32 if y has this dtype, and return the dtype of the norm's weight."""
        weight, bias = self.norm.weight, self.norm.bias
        if y.dtype != torch.float32 or weight.dtype != torch.float16:
            return self.norm(y)
        return F.layer_norm(y, self.norm.normalized_shape, weight.float(), bias.float(), self.norm.eps).to(weight.dtype)

    def mix(self, values: Tensor, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """Run the recurrence over values (B, H, W, C) with the states of the tokens x (B, H, W, C).

        `mask` is that of `forward`: values of padding are set to zero, which leaves all memories as they are.
        The result has the dtype of the values, but float32 where sums can exceed the range of float16.
        """
        tokens = self.recurrence.tokens(x)
        if self.long_sums and values.dtype == torch.float16:
            values = values.float()
        if self.mode != 'axis':
            return self._run(values, tokens, 0)
        # Queries and keys multiply the values twice. Without a norm, the results of some recurrences would be too small
        # for the epsilon of the next norm, and those of others too large for float16.
        if mask is not None:
            values = values.masked_fill(~mask[..., None], 0)
        columns = F.layer_norm(self._run(values, tokens, 1), values.shape[-1:], eps=self.norm.eps)
        columns = columns.to(values.dtype).transpose(1, 2)
        if mask is not None:
            columns = columns.masked_fill(~mask[..., None], 0)
        return self._run(columns, tokens, 2)

    def _run(self, values: Tensor, tokens: Dict[str, Tensor], axis: int) -> Tensor:
        """Run along the columns (axis 1), along the rows (2), or over the flattened image (0).

        Returns (B, H, W, C), and (B, W, H, C) for the columns."""
        batch, height, width, _ = values.shape
        shape = {0: (batch, height * width), 1: (batch * width, height), 2: (batch * height, width)}[axis]
        lines = []
        for y in (values, *tokens.values()):             # (B, H, W, heads * c) -> (lines, heads, T, c)
            y = y.transpose(1, 2) if axis == 1 else y    # exporters take at most 4 dimensions
            lines.append(y.reshape(*shape, self.num_heads, y.shape[3] // self.num_heads).transpose(1, 2))
        y = self.recurrence.scan(lines[0], dict(zip(tokens, lines[1:])), bidirectional=self.mode != 'forward')
        size = (width, height) if axis == 1 else (height, width)
        return y.transpose(1, 2).reshape(batch, *size, values.shape[3])

    def state_decay(self, x: Tensor) -> StateDecay:
        """Return how much the memories decay at each token of x (B, H, W, C).

        Raises:
            ValueError: the oscillation of this mixer is no decay for each token; the message says why.
        """
        batch, height, width, _ = x.shape
        tokens = {name: z.reshape(batch, height * width, self.num_heads, -1).transpose(1, 2)
                  for name, z in self.recurrence.tokens(x).items()}
        try:
            return state_decay(self.recurrence.decays(tokens), height, width)
        except ValueError as error:
            raise ValueError(f'mixer={self.mixer!r} has no decay for each token: {error}') from error
