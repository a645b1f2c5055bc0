"""Criss-cross attention by its definition: the reference of `decay_attention`, chained; tests compare with it."""
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE
from ..decay_attention.reference import decay_attention


def crisscross_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                         paths: str) -> Tensor:
    dtype = REFERENCE_DTYPE
    q, k, values, log_alpha, log_beta = (x.to(dtype) for x in (q, k, v, log_alpha, log_beta))

    def rows(x):
        return decay_attention(q, k, x, log_alpha, 'row', mask_mode)

    def columns(x):
        return decay_attention(q, k, x, log_beta, 'column', mask_mode)

    results = {'v2h': lambda: rows(columns(values)), 'h2v': lambda: columns(rows(values))}
    chosen = [f() for name, f in results.items() if paths in (name, 'both')]
    return (sum(chosen) / len(chosen)).to(v.dtype)
