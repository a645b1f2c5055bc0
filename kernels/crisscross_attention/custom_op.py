"""Registration of criss-cross attention with PyTorch: schema, shapes, gradient and operation count of the portable
backend and of the Triton kernels. A compiler sees one node for each. Triton is imported at the first call."""
from typing import List, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common import launch
from ..common.decay import compute_dtype, cumulative, empty_result, needs_gradient, portable_bfloat16
from ..decay_attention.custom_op import statistics_shape
from . import portable


@torch.library.custom_op('subquad::crisscross_attention_portable_fwd', mutates_args=())
def _portable_forward(q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str, paths: str) -> Tensor:
    return portable.forward(q, k, v, sa, sb, mask_mode, paths)


@torch.library.custom_op('subquad::crisscross_attention_portable_bwd', mutates_args=())
def _portable_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str,
                       paths: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return portable.backward(grad, q, k, v, sa, sb, mask_mode, paths)


@_portable_forward.register_fake
def _(q, k, v, sa, sb, mask_mode, paths):
    return torch.empty_like(v)


@_portable_backward.register_fake
def _(grad, q, k, v, sa, sb, mask_mode, paths):
    return tuple(torch.empty_like(x) for x in (q, k, v, sa, sb))


def _portable_save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


_portable_forward.register_autograd(
    lambda ctx, grad: (*_portable_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options), None, None),
    setup_context=_portable_save)


def _line_pairs(q: Sequence[int]) -> int:
    groups, height, width, _ = q
    return groups * height * width * (height + width)


@register_flop_formula(torch.ops.subquad.crisscross_attention_portable_fwd)
def _(q, k, v, sa, sb, mask_mode, paths, out_shape=None, **kwargs) -> int:
    return 2 * _line_pairs(q) * (q[-1] + v[-1] * (2 if paths == 'both' else 1))


@register_flop_formula(torch.ops.subquad.crisscross_attention_portable_bwd)
def _(grad, q, k, v, sa, sb, mask_mode, paths, out_shape=None, **kwargs) -> int:
    return 2 * _line_pairs(q) * (3 * q[-1] + v[-1] * (5 if paths == 'both' else 3))


def crisscross_attention_portable(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                                  paths: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    dtype = q.dtype if portable_bfloat16(q, k, v, log_alpha, log_beta) else compute_dtype(q.dtype)
    sums = cumulative(log_alpha, -1, q.dtype), cumulative(log_beta, -2, q.dtype)
    inputs = [x.flatten(0, 1).contiguous() for x in (*(x.to(dtype) for x in (q, k, v)), *sums)]
    return _portable_forward(*inputs, mask_mode, paths).view(v.shape).to(v.dtype)


@torch.library.custom_op('subquad::crisscross_attention_fwd', mutates_args=())
def _triton_forward(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str,
                    save: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output and, with `save`, the tensors that the backward pass needs (see `triton.forward`)."""
    from . import triton
    with torch.cuda.device_of(q):
        return triton.forward(q, k, v, log_alpha, log_beta, mask_mode, paths, save)


@torch.library.custom_op('subquad::crisscross_attention_bwd', mutates_args=())
def _triton_backward(grad: Tensor, inputs: List[Tensor], saved: List[Tensor], mask_mode: str,
                     paths: str) -> List[Tensor]:
    from . import triton
    with torch.cuda.device_of(grad):
        return triton.backward(grad, inputs, saved, mask_mode, paths)


@_triton_forward.register_fake
def _(q, k, v, log_alpha, log_beta, mask_mode, paths, save):
    shapes = [statistics_shape(q, v, axis, save) for axis in ('row', 'column')]
    statistics = [log_alpha.new_empty(shape, dtype=torch.float32) for shape in shapes]
    long = any(len(shape) > 1 for shape in shapes)
    down, along, first = (launch.token_major(v.shape, v) if needed else v.new_empty(0) for needed in (
        save and paths != 'h2v', save and paths != 'v2h', save and paths == 'both' and long))
    return launch.token_major(v.shape, v), down, along, first, *statistics


@_triton_backward.register_fake
def _(grad, inputs, saved, mask_mode, paths):
    return [*(launch.token_major(x.shape, x) for x in inputs[:3]), *map(launch.heads_last, inputs[3:])]


def _triton_save(ctx, inputs, output) -> None:
    *tensors, ctx.mask_mode, ctx.paths, ctx.saved = inputs
    out, *others, row_statistics, column_statistics = output
    if not (row_statistics.numel() or column_statistics.numel()):
        out = row_statistics                        # only long lines need the output: do not keep it alive
    ctx.save_for_backward(*tensors, out, *others, row_statistics, column_statistics)
    ctx.set_materialize_grads(False)


def _triton_differentiate(ctx, grad, *_):
    if not ctx.saved:
        raise RuntimeError('subquad::crisscross_attention_fwd ran with save=False: it has no gradient')
    tensors = list(ctx.saved_tensors)
    return (*_triton_backward(grad, tensors[:5], tensors[5:], ctx.mask_mode, ctx.paths), None, None, None)


_triton_forward.register_autograd(_triton_differentiate, setup_context=_triton_save)


@register_flop_formula(torch.ops.subquad.crisscross_attention_fwd)
def _(q, k, v, log_alpha, log_beta, mask_mode, paths, *args, out_shape=None, **kwargs) -> int:
    return 2 * _axis_pairs(q) * (q[-1] + v[-1] * (2 if paths == 'both' else 1))


@register_flop_formula(torch.ops.subquad.crisscross_attention_bwd)
def _(grad, inputs, saved, mask_mode, paths, out_shape=None, **kwargs) -> int:
    q, _, v, *_ = inputs
    return 2 * _axis_pairs(q) * (3 * q[-1] + v[-1] * (4 if paths == 'both' else 2))


def _axis_pairs(q: Sequence[int]) -> int:
    """Return the number of query-key pairs of all rows and all columns."""
    batch, heads, height, width, _ = q
    return batch * heads * height * width * (height + width)


def crisscross_attention_triton(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                                paths: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    return _triton_forward(q, k, v, log_alpha, log_beta, mask_mode, paths,
                           needs_gradient(q, k, v, log_alpha, log_beta))[0]
