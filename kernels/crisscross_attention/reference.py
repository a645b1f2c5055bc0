"""The definition: two chained applications of `decay_attention`'s reference."""
from torch import Tensor

from ..common.decay import REFERENCE_DTYPE
from ..decay_attention.reference import decay_attention


def crisscross_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, mask: str, order: str) -> Tensor:
    dtype = REFERENCE_DTYPE
    q, k, values, a, b = (x.to(dtype) for x in (q, k, v, a, b))

    def rows(x):
        return decay_attention(q, k, x, a, 'row', mask)

    def columns(x):
        return decay_attention(q, k, x, b, 'column', mask)

    results = {'column_first': lambda: rows(columns(values)), 'row_first': lambda: columns(rows(values))}
    chosen = [f() for name, f in results.items() if order in (name, 'both')]
    return (sum(chosen) / len(chosen)).to(v.dtype)
