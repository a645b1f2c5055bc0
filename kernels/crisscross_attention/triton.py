"""Criss-cross attention on Triton: the kernels of decay attention, once for each axis of each path.

This module imports no Triton: the operators of `decay_attention` do, at their first call."""
from torch import Tensor

from ..decay_attention.custom_op import decay_attention_triton


def crisscross_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                         paths: str) -> Tensor:
    if paths == 'both':
        both = [crisscross_attention(q, k, v, log_alpha, log_beta, mask_mode, path) for path in ('v2h', 'h2v')]
        return (both[0] + both[1]) * 0.5
    axes = [(log_beta, 'column'), (log_alpha, 'row')]
    for steps, axis in axes if paths == 'v2h' else axes[::-1]:
        v = decay_attention_triton(q, k, v, steps, axis, mask_mode)
    return v
