"""Expand-oscillation-shrink recurrence whose oscillation is a diagonal plus a matrix of rank one (LCSM, section 3)."""
from typing import Optional, Tuple, Union

from torch import Tensor

from ..common.autocast import without_autocast
from ..dispatch import choose, register
from ..eos_scan import fla
from ..eos_scan.eos_arguments import check_keys, check_log, check_run, tensors_of
from ..eos_scan.problem import direction_name
from ..eos_scan.registration import unchanged
from . import custom_op, portable, reference

register('eos_matmul', {
    'reference': reference.eos_matmul,
    'portable': custom_op.eos_matmul_portable,
    'triton': custom_op.eos_matmul_triton,
    'export': portable.eos_matmul_export,
    'fla': fla.eos_matmul_fla,
}, custom_op.unsupported)


def eos_matmul(
        i: Tensor,
        e: Tensor,
        s: Tensor,
        *,
        a: Tensor,
        b: Tensor,
        gk: Optional[Tensor] = None,
        scale: float = 1.0,
        reverse: bool = False,
        bidirectional: bool = False,
        initial_state: Optional[Tensor] = None,
        output_state: bool = False,
        chunk: int = 64,
        backend: str = 'auto',
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Compute y_t = m_t' s_t scale with m_t = (Diag(exp gk_t) + b_t a_t') m_{t-1} + e_t i_t' along each line.

    DeltaNet (fast weight programming) with keys k and rates beta has a = k, b = -beta k and e = beta k. The memory
    grows without bound unless the oscillation contracts: for a = k, b = -beta k this means beta |k|^2 <= 2.

    Chunks are computed by products: with w_t = a_t' m_{t-1} the recurrence is one with a diagonal oscillation and two
    inputs, e i' and b w', and the w of a chunk solve a triangular system.

    Args:
        i: input, shape (B, H, T, D); float32, float64, float16 or bfloat16; any strides.
        e, s, a, b: expand, shrink and the factors of the matrix of rank one, shape (B, H, T, K), dtype of i.
        gk: step logs <= 0 of the diagonal, shape (B, H, T, K), (B, H, T, 1), (H, K) or (H, 1), or None for the
            identity. They are clamped to [-80, 0] (positive ones raise an error where they can be read), and clamped
            values have no gradient.
        scale: factor of the output.
        reverse: run from the last token to the first: the result equals that of flipped arguments, flipped.
        bidirectional: the sum of both directions with the term of t itself, (s_t' e_t) i_t, counted once.
        initial_state: memory before the first token, shape (B, H, K, D), or None for zeros.
        output_state: also return the memory after the last token (with reverse: after the first).
        chunk: tokens of a chunk on longer lines: 16, 32, 64 or 128. 'portable' and 'export' take lines of up to 64
            tokens as one chunk. 'triton', 'reference' and 'fla' go token by token and do not use it.
        backend: 'auto', 'triton', 'portable', 'reference', 'export', or 'fla' for the operators of fla-core, which
            must be installed.

    Returns:
        y, of the shape and dtype of i; with output_state also the memory (B, H, K, D), in float32 or, for float64,
        float64.

    Raises:
        ValueError: a shape, device, size or combination of arguments is not allowed, or the tensors exceed the memory.
            On a CPU, outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    op = 'eos_matmul'
    keys = check_keys(op, i, static=False, e=e, s=s, a=a, b=b)
    for name, x in dict(e=e, s=s, a=a, b=b).items():
        if x.is_complex():
            raise TypeError(f'{op}: {name} must be real, got dtype {x.dtype}')
    if gk is not None:
        check_log(op, 'gk', gk, i, keys)
    check_run(op, i, keys, scale, reverse, bidirectional, initial_state, output_state, chunk)
    tensors = tensors_of(i, e, s, a, b, gk, initial_state)
    run = choose(op, backend, *tensors)
    with without_autocast(i):
        if i.numel() == 0:
            y, state = unchanged(i, tensors[1:], keys, initial_state)
        else:
            y, state = run(i, e, s, a, b, gk, scale, direction_name(reverse, bidirectional), initial_state,
                           output_state, chunk)
    return (y, state) if output_state else y
