"""Criss-cross attention on Triton: a chain of decay attention's kernels, one for each axis of each order."""
from torch import Tensor

from ..decay_attention.custom_op import decay_attention


def crisscross_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, mask: str, order: str) -> Tensor:
    if order == 'both':
        both = [crisscross_attention(q, k, v, a, b, mask, one) for one in ('column_first', 'row_first')]
        return (both[0] + both[1]) * 0.5
    axes = [(b, 'column'), (a, 'row')]
    for steps, axis in axes if order == 'column_first' else axes[::-1]:
        v = decay_attention(q, k, v, steps, axis, mask)
    return v
