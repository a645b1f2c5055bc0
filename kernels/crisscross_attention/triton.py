"""Criss-cross attention on the Triton kernels of decay attention. P_w are the weights within rows, P_h within columns:

    v2h:   P_w (P_h v),      h2v:   P_h (P_w v),      both:   1/2 P_w (P_h v) + 1/2 P_h (P_w v)

A single path takes two launches. Both take three, forward and backward: P_h v; then P_w v and P_w (P_h v) with one set
of weights; then P_h (P_w v) and the mean. The backward pass computes 1/2 P_h' g first, then all gradients of the rows,
then those of the columns, which it adds to them. Lines longer than a tile also need their sums, and in the backward
pass delta, from small launches.
"""
from typing import List, Tuple

from torch import Tensor

from ..common import launch
from ..common.tiles import row_products
from ..decay_attention.triton import Lines
from ..decay_attention.triton_backward import differentiate, transposed


def forward(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str,
            save: bool) -> Tuple[Tensor, ...]:
    """Return the output and, with `save`, five tensors that the backward pass needs; otherwise these are empty.

    They are P_h v, P_w v, P_w (P_h v) if a line exceeds a tile, and the statistics of rows and of columns (see
    `decay_attention.triton.Lines`)."""
    rows, columns = (Lines(q, k, steps, v.shape[-1], axis, mask_mode, save=save)
                     for steps, axis in ((log_alpha, 'row'), (log_beta, 'column')))
    down, along, first = (v.new_empty(0) for _ in range(3))
    if paths == 'v2h':
        down, _ = columns.apply(v)
        out, _ = rows.apply(down)
    elif paths == 'h2v':
        along, _ = rows.apply(v)
        out, _ = columns.apply(along)
    else:
        down, _ = columns.apply(v, share=True)
        along, first = rows.apply(v, down, share=True)
        out, _ = columns.apply(along, earlier=first, share=True)
        if rows.whole and columns.whole:
            first = v.new_empty(0)
    if not save:
        down, along, first = (v.new_empty(0) for _ in range(3))
    return out, down, along, first, rows.statistics, columns.statistics


def backward(grad: Tensor, inputs: List[Tensor], saved: List[Tensor], mask_mode: str, paths: str) -> List[Tensor]:
    """Return the gradients of the inputs q, k, v, log_alpha and log_beta. saved: what `forward` returned."""
    q, k, v, log_alpha, log_beta = inputs
    out, down, along, first, *statistics = saved
    rows, columns = (Lines(q, k, steps, v.shape[-1], axis, mask_mode, statistics=x)
                     for steps, axis, x in zip((log_alpha, log_beta), ('row', 'column'), statistics))
    grad = launch.as_token_major(grad)
    dq, dk, dv = (launch.token_major(x.shape, x) for x in (q, k, v))
    inner = launch.token_major(v.shape, v)                     # the gradient of P_h v, or of P_w v for h2v
    if paths == 'both':
        dalong = transposed(columns, grad)
        deltas = None if rows.whole and columns.whole else 0.5 * row_products(grad, first, out)
        delta = None if rows.whole else deltas[0] + row_products(dalong, along)[0]
        dalpha = differentiate(rows, v, dalong, dq, dk, dv, delta, down, grad, inner)
        delta = None if columns.whole else deltas[1] + row_products(inner, down)[0]
        dbeta = differentiate(columns, v, inner, dq, dk, dv, delta, along, grad, add=True)
        return [dq, dk, dv, dalpha, dbeta]
    # `last` made the output from what `before` made of v.
    last, before, middle = (rows, columns, down) if paths == 'v2h' else (columns, rows, along)
    dlast = differentiate(last, middle, grad, dq, dk, inner, None if last.whole else row_products(grad, out))
    delta = None if before.whole else row_products(inner, middle)
    dbefore = differentiate(before, v, inner, dq, dk, dv, delta, add=True)
    return [dq, dk, dv, *((dlast, dbefore) if paths == 'v2h' else (dbefore, dlast))]
