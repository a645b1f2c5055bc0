"""A layer like attention that mixes tokens by a solve on a quad tree (Myosotis, arXiv 2509.20503)."""
from functools import partial
from struct import Struct
from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import checks
from ..common.declare import check_saved, late, node
from ..common.launch import token_major
from ..common.numerics import empty_result, needs_gradient
from ..dispatch import OPERATORS, Operator, choose
from ..native import DONE, function
from ..quadtree_solve import quadtree_solve
from ..trees import PARAMETRIZATIONS, RHO, quadtree_levels
from ..trees.edges import composed
from . import portable, reference
from .portable import Options


def quadtree_attention(
        q: Optional[Tensor],
        k: Optional[Tensor],
        v: Tensor,
        bias: Tensor,
        *,
        parametrization: str = 'laplacian',
        rho: float = RHO,
        mask: Optional[Tensor] = None,
        shift: Sequence[int] = (0, 0),
        max_levels: Optional[int] = None,
        backend: str = 'auto',
) -> Tensor:
    """Solve for the values of a grid on a quad tree whose edges come from queries and keys.

    The value, query and key of an inner node are the means over its leaves (`level_means`). For each head, the edge
    between a node c and its parent p has the logit

        z = q_c . k_p / sqrt(E) + bias[level of c, row of c % 2, column of c % 2],

    where rows and columns are those of the level's grid in the tree. The weight of the edge is 4^level * softplus(z)
    for 'laplacian', and z for 'symmetric' and 'skew'. The result is the solution of `quadtree_solve` at the leaves.

    Args:
        q, k: queries and keys of the leaves, (B, heads, H, W, E); float32, float64, float16 or bfloat16; any strides.
            None for edges from biases only.
        v: values of the leaves, (B, heads, H, W, D) and any of these dtypes.
        bias: (L, 2, 2, heads); levels from L on take the last entry.
        parametrization: 'laplacian', 'symmetric' or 'skew', as for `quadtree_solve`.
        rho: the bound of 'symmetric', in (0, 1).
        mask: padding mask, booleans of shape (B, H, W), true for leaves that exist. Others do not affect them.
        shift: rows and columns by which the grid is shifted against the tree.
        max_levels: None for one tree; the number of levels for a forest.
        backend: 'auto', 'triton', 'native', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of shape (B, heads, H, W, D) and the dtype of v.

    Raises:
        ValueError: a shape, device, number of levels, shift, name or rho is not allowed, or the tensors exceed the
            memory. On a CPU also: an edge is not finite, or a pivot is zero; the error names the level.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    op, products = 'quadtree_attention', {} if q is None and k is None else {'q': q, 'k': k}
    checks.tensors(op, {'q': 5, 'k': 5, 'v': 5, 'bias': 4}, v=v, bias=bias, **products)
    checks.one_of(op, 'parametrization', parametrization, PARAMETRIZATIONS)
    checks.number(op, 'rho', rho)
    if not 0 < rho < 1:
        raise ValueError(f'{op}: rho must be between 0 and 1, got {rho!r}')
    if 0 in v.shape[2:4]:
        raise ValueError(f'{op}: v must have at least one leaf, got shape {tuple(v.shape)}')
    quadtree_levels(1, 1, max_levels, shift)    # it checks both; the sizes of v may be symbols
    checks.shapes(op, ('bias', bias, (bias.shape[0], 2, 2, v.shape[1]), 'levels, rows, columns and the heads of v'))
    if not bias.shape[0]:
        raise ValueError(f'{op}: bias must have at least one level, got shape {tuple(bias.shape)}')
    if products:
        checks.same_dtype(op, **products)
        checks.shapes(op, ('q', q, (*v.shape[:4], q.shape[-1]), 'the shape of v except the last dimension'))
        checks.shapes(op, ('k', k, q.shape, 'as q'))
    if mask is not None:
        checks.boolean(op, 'mask', mask, v)
        checks.shapes(op, ('mask', mask, (v.shape[0], *v.shape[2:4]), 'one for each leaf'))
    run = choose(op, backend, v, bias, *products.values())
    return run(q, k, v, bias, mask, Options(parametrization, rho, tuple(shift), max_levels))


# --- what PyTorch sees on a CPU; on a GPU, a compiler fuses operations around `quadtree_solve`

def _count(v, shift, max_levels) -> int:
    """Return the number of channels of all nodes."""
    batch, heads, height, width, dim = v
    levels = quadtree_levels(height, width, max_levels, shift)
    return batch * heads * dim * sum(level.height * level.width for level in levels)


def _run(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor], *given
         ) -> Tuple[Tensor, Tensor, Tensor]:
    *options, save = given
    out, *saved = portable.forward(q, k, v, bias, mask, Options(*options))
    return (out, *saved) if save else (out, *(x.new_empty(0) for x in saved))


# As many operations as `quadtree_solve`.
@node('quadtree_attention_portable_fwd', _run,
      lambda q, k, v, bias, mask, parametrization, rho, shift, max_levels, save: (
          5 * _count(v, shift, max_levels)))
def _forward(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
             parametrization: str, rho: float, shift: List[int], max_levels: Optional[int], save: bool
             ) -> Tuple[Tensor, Tensor, Tensor]:
    """The output and, with `save`, what the backward pass needs (see `portable.forward`)."""
    options, dtype = Options(parametrization, rho, shift, max_levels), portable.exact_dtype(q, v)
    shapes = portable.saved_shapes(q, v, options) if save else ((0,), (0,))
    return token_major(v.shape, v), *(v.new_empty(shape, dtype=dtype) for shape in shapes)


@node('quadtree_attention_portable_bwd',
      lambda *args: portable.backward(*args[:8], Options(*args[8:])),
      lambda grad, *others: 9 * _count(grad, *others[-2:]))
def _backward(grad: Tensor, q: Optional[Tensor], k: Optional[Tensor], bias: Tensor, mask: Optional[Tensor], out: Tensor,
              inner: Tensor, logits: Tensor, parametrization: str, rho: float, shift: List[int],
              max_levels: Optional[int]) -> List[Tensor]:
    """Gradients of v, bias and, unless they are None, of q and k."""
    gradients = [token_major(x.shape, x) for x in ((out,) if q is None else (out, q, k))]
    return [gradients[0], torch.empty_like(bias), *gradients[1:]]


def _save(ctx, inputs, output) -> None:
    q, k, _, bias, mask, *ctx.options, ctx.saved = inputs
    ctx.save_for_backward(q, k, bias, mask, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, *_):
    check_saved(_forward, ctx.saved)
    if grad is None:
        return (None,) * 10
    dv, dbias, *dqk = _backward(grad, *ctx.saved_tensors, *ctx.options)
    return *(dqk or (None, None)), dv, dbias, *(None,) * 6


_forward.register_autograd(_differentiate, setup_context=_save)


def _portable(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
              options: Options) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, bias)
    save = needs_gradient(q, k, v, bias)
    return _forward(q, k, v, bias, mask, *options, save)[0]


# --- C++

# `struct Attention` of native.cpp.
_ARGUMENTS = Struct('7Q10q4q4q4q4q3qd')


def _call(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
          options: Options, gate: Optional[Tensor], y: Tensor) -> bool:
    """Write the output by the library. False if it must be computed in another way."""
    if q is not None and q.dtype != v.dtype or gate is not None and gate.dtype != v.dtype:
        return False
    q, k, v, gate = (None if x is None else x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, gate))
    bias, mask = bias.float().contiguous(), None if mask is None else mask.contiguous()
    arguments = _ARGUMENTS.pack(
        *(0 if x is None else x.data_ptr() for x in (q, k, v, gate, bias, mask, y)),
        *v.shape, 0 if q is None else q.shape[-1], *options.shift, options.max_levels or 0, len(bias),
        *(stride for x in (q, k, v, gate) for stride in ((0,) * 4 if x is None else x.stride()[:4])),
        v.dtype == torch.bfloat16, PARAMETRIZATIONS.index(options.parametrization), torch.get_num_threads(),
        options.rho)
    return function('quadtree_attention')(arguments) == DONE


def _run_native(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
                parametrization: str, rho: float, shift: List[int], max_levels: Optional[int],
                gate: Optional[Tensor] = None) -> Tensor:
    options, y = Options(parametrization, rho, shift, max_levels), token_major(v.shape, v)
    if _call(q, k, v, bias, mask, options, gate, y):
        return y
    y = portable.forward(q, k, v, bias, mask, options)[0]
    return y if gate is None else F.silu(gate) * y


@node('quadtree_attention_native_fwd', _run_native,
      lambda q, k, v, bias, mask, parametrization, rho, shift, max_levels, *_: 5 * _count(v, shift, max_levels))
def native_forward(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
                   parametrization: str, rho: float, shift: List[int], max_levels: Optional[int],
                   gate: Optional[Tensor] = None) -> Tensor:
    """Return the operator's result, times SiLU(gate) with a gate (B, heads, H, W, D). It has no gradient."""
    return token_major(v.shape, v)


def _native(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor], options: Options
            ) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, bias)
    return native_forward(q, k, v, bias, mask, *options)


# --- Triton

@node('quadtree_attention_fwd', late(__name__, 'triton.forward'),
      lambda q, k, v, bias, parametrization, rho, shift, max_levels: 5 * _count(v, shift, max_levels))
def _fused(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, parametrization: str, rho: float,
           shift: List[int], max_levels: Optional[int]) -> Tensor:
    """Return the operator's result without a mask in a few launches. It has no gradient."""
    return token_major(v.shape, v)


def _triton(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor], options: Options
            ) -> Tensor:
    if mask is None and v.numel() and not needs_gradient(q, k, v, bias):
        return _fused(q, k, v, bias, *options)
    return composed(q, k, v, bias, mask, options.parametrization, options.levels(v),
                    partial(quadtree_solve, rho=options.rho, backend='triton'))


OPERATORS['quadtree_attention'] = Operator(
    implementations={
        'reference': reference.quadtree_attention,
        'portable': _portable,
        'native': _native,
        'triton': _triton,
        'export': portable.quadtree_attention_export,
    },
)
