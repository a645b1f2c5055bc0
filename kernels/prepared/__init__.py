"""Operators that prepared networks run on a GPU: norms of sums, biases with activations, sums of step logs.

They have no gradient and no other backend: networks run their own equations where Triton does not.
"""
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..common.declare import late, node


@node('layer_norm_fwd', late(__name__, 'triton_layer_norm.forward'), lambda *_: 0)
def layer_norm(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, add: Optional[Tensor] = None,
               ahead: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """Return the norm of s = x + add over the channels and, with `add`, s + ahead; otherwise an empty tensor.

    Sums are in float32, and each result is rounded once.

    Args:
        x: (..., C), float32, float16 or bfloat16, dense.
        weight, bias: (C,) each, or both None.
        eps: added to the variance.
        add: a tensor of the shape and dtype of x, or None for 0.
        ahead: (C,), the bias of a later layer whose product is added to the sum in place; None for 0.
    """
    return x.new_empty(x.shape), x.new_empty(x.shape if add is not None else 0)


@node('group_norm_fwd', late(__name__, 'triton_group_norm.forward'), lambda *_: 0)
def group_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, add: Optional[Tensor] = None,
               ahead: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """Return the norm of s = x + add over tokens and channels and, with `add`, s + ahead; otherwise an empty tensor.

    It is a group norm of one group. Sums are in float32, and each result is rounded once.

    Args:
        x: (B, H, W, C), float32, float16 or bfloat16, dense.
        weight, bias: (C,).
        eps: added to the variance.
        add: a tensor of the shape and dtype of x, or None for 0.
        ahead: (C,), the bias of a later layer whose product is added to the sum in place; None for 0.
    """
    return x.new_empty(x.shape), x.new_empty(x.shape if add is not None else 0)


@node('bias_act_fwd', late(__name__, 'triton_bias_act.forward'), lambda *_: 0)
def bias_act(x: Tensor, bias: Tensor, act: str) -> Tensor:
    """Return act(x + bias), computed in float32.

    Args:
        x: (..., C), float32, float16 or bfloat16, dense.
        bias: (C,).
        act: 'none', 'gelu' (the exact one) or 'silu'.
    """
    return x.new_empty(x.shape)


@node('path_sums_fwd', late(__name__, 'triton_path_sums.forward'), lambda *_: 0)
def path_sums(z: Tensor, a_log: Tensor, scale: float, sums: bool) -> Tensor:
    """Return the step logs -exp(a_log) softplus(z) / scale, clamped to [-80, 0], or their sums from the first token on.

    Args:
        z: (B, H, W, heads) or (B, H, W, 2 heads): the horizontal steps of all heads, then the vertical ones if these
            differ; float32, float16 or bfloat16, any strides.
        a_log: (heads,).
        scale: a positive number.
        sums: add up the horizontal step logs along rows, and the vertical ones along columns, in float64.

    Returns:
        (2, B, heads, H, W), float32: horizontal and vertical.
    """
    return z.new_empty((2, z.shape[0], len(a_log), *z.shape[1:3]), dtype=torch.float32)
