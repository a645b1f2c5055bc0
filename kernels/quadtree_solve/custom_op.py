"""Registration of the quad-tree solve with PyTorch: schema, shapes, gradient and operation count of the portable
backend and of the Triton kernels. A compiler sees one node for each. Triton is imported at the first call."""
from typing import Any, List, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import portable


@torch.library.custom_op('subquad::quadtree_solve_portable_fwd', mutates_args=())
def _portable_forward(values: List[Tensor], edges: List[Tensor], parametrization: str, shift: List[int]
                      ) -> List[Tensor]:
    return portable.forward(values, edges, parametrization, shift)


@torch.library.custom_op('subquad::quadtree_solve_portable_bwd', mutates_args=())
def _portable_backward(grads: List[Tensor], solution: List[Tensor], edges: List[Tensor], parametrization: str,
                       shift: List[int]) -> Tuple[List[Tensor], List[Tensor]]:
    return portable.backward(grads, solution, edges, parametrization, shift)


@torch.library.custom_op('subquad::quadtree_solve_fwd', mutates_args=())
def _triton_forward(values: List[Tensor], edges: List[Tensor], parametrization: str, shift: List[int]) -> List[Tensor]:
    from . import triton
    with torch.cuda.device_of(values[0]):
        return triton.forward(values, edges, parametrization, shift)


@torch.library.custom_op('subquad::quadtree_solve_bwd', mutates_args=())
def _triton_backward(grads: List[Tensor], solution: List[Tensor], edges: List[Tensor], parametrization: str,
                     shift: List[int]) -> Tuple[List[Tensor], List[Tensor]]:
    from . import triton
    with torch.cuda.device_of(solution[0]):
        return triton.backward(grads, solution, edges, parametrization, shift)


def _save(ctx, inputs, output) -> None:
    _, edges, ctx.parametrization, ctx.shift = inputs
    ctx.levels = len(output)
    ctx.save_for_backward(*output, *edges)
    ctx.set_materialize_grads(False)


def _complete(forward: Any, backward: Any) -> None:
    """Register shapes, gradient and operation counts of a forward and a backward operator."""
    def gradient(ctx, grads):
        saved = ctx.saved_tensors
        solution, edges = list(saved[:ctx.levels]), list(saved[ctx.levels:])
        if all(grad is None for grad in grads):
            return [None] * ctx.levels, [None] * len(edges), None, None
        grads = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, solution)]
        return (*backward(grads, solution, edges, ctx.parametrization, ctx.shift), None, None)

    forward.register_fake(lambda values, edges, parametrization, shift: [torch.empty_like(x) for x in values])
    backward.register_fake(lambda grads, solution, edges, parametrization, shift: (
        [torch.empty_like(g, dtype=x.dtype) for g, x in zip(grads, solution)], [torch.empty_like(e) for e in edges]))
    forward.register_autograd(gradient, setup_context=_save)
    # For each node and channel: multiply and add up, multiply by 1 / S, multiply and add down.
    register_flop_formula(forward._opoverload.overloadpacket)(
        lambda values, *args, out_shape=None, **kwargs: 5 * _count(values))
    # The adjoint solve, and two differences, a product and a sum for each edge and channel.
    register_flop_formula(backward._opoverload.overloadpacket)(
        lambda grads, *args, out_shape=None, **kwargs: 9 * _count(grads))


def _count(shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


_complete(_portable_forward, _portable_backward)
_complete(_triton_forward, _triton_backward)


def quadtree_solve_triton(values: List[Tensor], edges: List[Tensor], parametrization: str, shift) -> List[Tensor]:
    return _triton_forward(values, edges, parametrization, list(shift))


def quadtree_solve_portable(values: List[Tensor], edges: List[Tensor], parametrization: str, shift) -> List[Tensor]:
    return _portable_forward(values, edges, parametrization, list(shift))
