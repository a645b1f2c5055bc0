"""Checks that operators share. Those of arguments raise errors that name the argument, its value and what is allowed;
those of a call tell whether a graph is recorded or a transform runs."""
import math
import os
from functools import lru_cache
from numbers import Real
from typing import Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Tensors of at most this many elements are not compared with the size of the memory.
LARGE = 1 << 30
# What several operators allow: how the decay enters the softmax, and which polylines the mask follows.
MASK_MODES = ('additive', 'multiplicative')
PATHS = ('both', 'v2h', 'h2v')


def exporting() -> bool:
    """True while torch.export or torch.jit.trace records a graph; the ONNX exporter uses one of the two."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def forward_mode() -> bool:
    """True where tensors may carry tangents: inside torch.func.jvp, jacfwd and torch.autograd.forward_ad."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """True inside the transforms of torch.func (grad, vmap, jvp, ...) and torch.autograd.forward_ad."""
    return forward_mode() or torch._C._are_functorch_transforms_active()


def is_traced_or_wrapped(x: Tensor) -> bool:
    """True for traced or functorch-wrapped tensors; do not cache, mutate or read them."""
    return (torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing()
            or type(x) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(x))


def one_of(op: str, name: str, value: str, allowed: Sequence[str]) -> None:
    """Check that a value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def flags(op: str, **given: bool) -> None:
    """Check that values are True or False: any other one, such as the string 'no', would count as True."""
    for name, value in given.items():
        if value is not True and value is not False:
            raise TypeError(f'{op}: {name} must be True or False, got {value!r}')


def number(op: str, name: str, value: float, positive: bool = False) -> None:
    """Check that a value is a finite real number, and above 0 if `positive`."""
    kind = 'a positive finite number' if positive else 'a finite number'
    if isinstance(value, bool) or not isinstance(value, Real):
        came = f'a {type(value).__name__}' if isinstance(value, Tensor) else repr(value)
        raise TypeError(f'{op}: {name} must be {kind}, got {came}')
    # A comparison would specialize a graph.
    if (not (torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing())
            and (not math.isfinite(value) or positive and value <= 0)):
        raise ValueError(f'{op}: {name} must be {kind}, got {value!r}')


def tensors(op: str, ranks: Mapping[str, int], *same: str, **given: Tensor) -> None:
    """Check that all tensors are dense, on one device, of the ranks given, of an allowed dtype, and fit into memory.

    same: names of tensors that must have one dtype."""
    device = dtype = None
    # A comparison of sizes that may be symbolic would specialize a graph.
    symbolic = torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing()
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f'{op}: {name} must be a tensor, got {type(tensor).__name__}')
        if tensor.layout is not torch.strided or tensor.is_nested:
            dense(op, name, tensor)
        if tensor.ndim != ranks[name]:
            raise ValueError(f'{op}: {name} must have {ranks[name]} dimensions, got shape {tuple(tensor.shape)}')
        if tensor.dtype not in DTYPES:
            allowed = ', '.join(str(d).removeprefix('torch.') for d in DTYPES)
            raise TypeError(f'{op}: {name} has dtype {tensor.dtype}; allowed: {allowed}')
        device = device or tensor.device
        if tensor.device != device:
            raise ValueError(f'{op}: {name} is on {tensor.device}, the other arguments on {device}')
        if name in same:
            dtype = dtype or tensor.dtype
            if tensor.dtype != dtype:
                same_dtype(op, **{name: given[name] for name in same})
        if not symbolic and tensor.numel() > LARGE:
            fits(op, name, tensor, tensor.shape)


def dense(op: str, name: str, tensor: Tensor) -> None:
    """Check that a tensor is neither sparse nor nested."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = 'a nested tensor' if tensor.is_nested else f'a tensor of layout {tensor.layout}'
        raise TypeError(f'{op}: {name} must be a dense tensor, got {kind}')


def fits(op: str, name: str, like: Tensor, shape: Sequence[int]) -> None:
    """Check that a result of this shape, of like's dtype, fits into the memory of like's device.

    An expanded tensor takes little memory itself, but a result computed from it takes its full size."""
    if torch.compiler.is_compiling() or exporting():     # sizes may be symbols
        return
    elements = torch.Size(shape).numel()
    if not isinstance(elements, int) or elements <= LARGE or like.is_meta or is_traced_or_wrapped(like.detach()):
        return
    needed, room = elements * like.element_size(), _memory(like.device)
    if room is not None and needed > room:
        raise ValueError(f'{op}: {name} has a shape of {tuple(shape)}, and a result of that shape takes '
                         f'{needed / 1e9:,.0f} GB; {like.device} has {room / 1e9:,.0f} GB')


@lru_cache(maxsize=64)
def _memory(device: torch.device) -> Optional[int]:
    """Return the size of a device's memory in bytes, or None if it is unknown."""
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == 'cpu' and hasattr(os, 'sysconf'):
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return None


def step_logs(op: str, **logs: Tensor) -> None:
    """Raise for positive step logs if values are `readable`; otherwise backends clamp them to 0."""
    for log in logs.values():
        if not readable(log):
            return
    for name, log in logs.items():
        if (top := log.amax().item()) > 0:
            raise ValueError(f'{op}: {name} must not be positive (it is the logarithm of a decay factor of at most 1 '
                             f'for each step), got {top:g}')


def not_negative(op: str, name: str, x: Tensor, when: str) -> None:
    """Check that no number is below zero, if the values are `readable`; `when` says when this is required."""
    if readable(x) and (least := x.amin().item()) < 0:
        raise ValueError(f'{op}: {name} must not be negative {when}, got {least:g}')


def readable(x: Tensor) -> bool:
    """Whether the values of x can be read at no cost.

    False on GPUs, where reading synchronizes, and for traced tensors, which have no values."""
    return x.is_cpu and x.numel() > 0 and not is_traced_or_wrapped(x.data if isinstance(x, torch.nn.Parameter) else x)


def boolean(op: str, name: str, mask: Tensor, like: Tensor) -> None:
    """Check that mask is a dense tensor of booleans on like's device."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        came = f'dtype {mask.dtype}' if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f'{op}: {name} must be a tensor of dtype torch.bool, True where a token exists, got {came}')
    dense(op, name, mask)
    if mask.device != like.device:
        raise ValueError(f'{op}: {name} is on {mask.device}, the other arguments on {like.device}')


def same_dtype(op: str, **given: Tensor) -> None:
    """Check that all tensors have one dtype."""
    first = None
    for tensor in given.values():
        first = first or tensor.dtype
        if tensor.dtype != first:
            kinds = ', '.join(str(tensor.dtype) for tensor in given.values())
            raise TypeError(f"{op}: {', '.join(given)} must share a dtype, got {kinds}")


def shapes(op: str, *rows: Tuple[str, Tensor, Sequence[int], str]) -> None:
    """Check the shapes of tensors. A row has a name, the tensor, its expected shape and where that comes from."""
    for name, tensor, expected, why in rows:
        if tuple(tensor.shape) != tuple(expected):
            raise ValueError(f'{op}: {name} must have shape {tuple(expected)} ({why}), got {tuple(tensor.shape)}')


def attention(op: str, q: Tensor, k: Tensor, v: Tensor, *, tokens: bool = False, **logs: Tensor) -> None:
    """Check the tensors of an attention: q, k (B, heads, H, W, D), v (B, heads, H, W, Dv), logs (B, heads, H, W).

    With `tokens`, q, k and v may also have H * W in place of H, W.
    """
    tokens = tokens and isinstance(q, Tensor) and q.ndim == 4
    rank = 4 if tokens else 5
    tensors(op, {'q': rank, 'k': rank, 'v': rank, **dict.fromkeys(logs, 4)}, 'q', 'k', 'v', q=q, k=k, v=v, **logs)
    if q.shape[-1] < 1:
        raise ValueError(f'{op}: q and k must have at least one channel, got shape {tuple(q.shape)}')
    rows = [('k', k, q.shape, 'as q'),
            ('v', v, (*q.shape[:-1], v.shape[-1]), 'the shape of q except the last dimension')]
    for name, log in logs.items():
        if not tokens:
            rows.append((name, log, q.shape[:-1], 'a step log for each token and head of q'))
        elif log.shape[:2] != q.shape[:2] or log.shape[2] * log.shape[3] != q.shape[2]:
            raise ValueError(f'{op}: {name} must have shape {(*q.shape[:2], "H", "W")} with H * W = {q.shape[2]} (a '
                             f'step log for each token and head of q), got {tuple(log.shape)}')
    shapes(op, *rows)
    step_logs(op, **logs)
