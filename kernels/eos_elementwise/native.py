"""The recurrence in C++ for CPUs, token by token: of lines, and of a grid with the layers around it."""
from itertools import chain
from struct import Struct
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common.launch import token_order
from ..eos_scan.problem import DIRECTIONS
from ..native import DONE, function

Empty = Optional[Tensor]
_RECURRENCE = Struct('11qd' + 'Q4q' * 8 + '12Q')                             # `struct Recurrence` of native.cpp
_AXES = Struct('4Q8q2d')                                                     # `struct Axes` of native_axes.cpp


def forward(*args: Any) -> Tuple[Tensor, Tensor]:
    """Compute the output and, if `last`, the last memory; see `_native_forward`."""
    i, e, *_, last = args
    batch, heads, length, dim = i.shape
    y = i.new_empty((batch, length, heads, dim)).transpose(1, 2)
    final = i.new_empty((batch, heads, e.shape[3], dim) if last else 0, dtype=torch.float32)
    _recur(None, None, args[:-2], [y, final if last else None, *[None] * 8])
    return y, final


def backward(dy: Tensor, dfinal: Empty, *args: Any) -> List[Tensor]:
    """Return the gradients of the tensors, in float32; empty for those not given."""
    i, e, _, _, _, z, weight, _ = args[:8]
    batch, heads, length, dim = i.shape
    keys = e.shape[3]

    def of(x: Empty, *shape: int) -> Empty:
        return None if x is None else i.new_empty(shape, dtype=torch.float32)

    axis = None if z is None else 4 if z.shape[4] == 1 else 3
    channels = (dim, keys, keys, keys, dim, keys if axis == 4 else dim)
    found = [*(of(x, batch, length, heads, n) for x, n in zip(args, channels)),
             *(of(x, batch, heads, keys, dim) for x in args[6:8])]
    _recur(dy, dfinal, args, [None, None, *found])
    grads = [i.new_empty(0) if x is None else x.transpose(1, 2) for x in found[:6]]
    for n in (3, 4):
        if args[n] is not None and args[n].shape != grads[n].shape:
            grads[n] = token_order(args[n]).copy_(grads[n].sum_to_size(args[n].shape))
    if z is None:
        return [*grads, i.new_empty(0), i.new_empty(0) if found[7] is None else found[7]]
    grads[5] = torch.empty_like(z, dtype=torch.float32, memory_format=torch.contiguous_format).copy_(
        grads[5].unsqueeze(axis).sum_to_size(z.shape))
    return [*grads, found[6].sum(0).sum_to_size(weight.shape), i.new_empty(0) if found[7] is None else found[7]]


def _recur(dy: Empty, dfinal: Empty, args: Sequence[Any], outputs: Sequence[Empty]) -> None:
    i, e, s, log_k, log_d, z, weight, state, form, tau, direction = args
    (batch, heads, length, dim), keys = i.shape, e.shape[3]
    tokens = (batch, heads, length)
    if log_k is not None:
        log_k = log_k.expand(*tokens, keys)
    if log_d is not None:
        log_d = log_d.expand(*tokens, dim)
    of_keys = z is not None and z.shape[4] == 1
    if z is not None:
        z = (z[..., 0].expand(*tokens, keys) if of_keys else z[:, :, :, 0].expand(*tokens, dim)).float()
        weight = weight.float().expand(heads, keys, dim)[None]
    state, dfinal = [None if x is None else x.float().contiguous() for x in (state, dfinal)]
    passes = DIRECTIONS[direction]
    rows = [(0,) * 5 if x is None else (x.data_ptr(), *x.stride()) for x in (i, e, s, log_k, log_d, z, weight, dy)]
    dense = [0 if x is None else x.data_ptr() for x in (state, dfinal, *outputs)]
    _call('eos_elementwise', _RECURRENCE.pack(
        batch, heads, length, keys, dim, i.dtype == torch.bfloat16, False in passes, True in passes, of_keys,
        form == 'sigmoid', torch.get_num_threads(), tau, *chain.from_iterable(rows), *dense))


def axes(x: Tensor, weight: Tensor, bias: Tensor, heads: int, keys: int, rate: float, eps: float) -> Tensor:
    x, weight, bias = x.contiguous(), weight.float().contiguous(), bias.float().contiguous()
    channels = weight.shape[0]
    y = x.new_empty(*x.shape[:3], channels)
    _call('eos_axes', _AXES.pack(
        x.data_ptr(), y.data_ptr(), weight.data_ptr(), bias.data_ptr(), *x.shape[:3], heads, keys, channels // heads,
        x.dtype == torch.bfloat16, torch.get_num_threads(), rate, eps))
    return y


def _call(name: str, arguments: bytes) -> None:
    if function(name)(arguments) != DONE:
        raise MemoryError(f'{name}: there is no memory for the states of the lines')
