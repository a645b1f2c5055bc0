"""Expand-oscillation-shrink recurrence with an elementwise oscillation (LCSM, Qin et al., 2024, section 3)."""
from typing import Optional, Tuple, Union

from torch import Tensor

from ..common.autocast import without_autocast
from ..dispatch import choose, register
from ..eos_scan import DecayGenerator, fla
from ..eos_scan.eos_arguments import check_keys, check_oscillation, check_run, tensors_of
from ..eos_scan.problem import Oscillation, direction_name
from ..eos_scan.registration import unchanged
from . import custom_op, portable, reference

register('eos_elementwise', {
    'reference': reference.eos_elementwise,
    'portable': custom_op.eos_elementwise_portable,
    'triton': custom_op.eos_elementwise_triton,
    'export': portable.eos_elementwise_export,
    'fla': fla.eos_elementwise_fla,
}, custom_op.unsupported)


def eos_elementwise(
        i: Tensor,
        e: Tensor,
        s: Tensor,
        *,
        log_o_k: Optional[Tensor] = None,
        log_o_d: Optional[Tensor] = None,
        log_o: Optional[Tensor] = None,
        theta: Optional[Tensor] = None,
        generator: Optional[DecayGenerator] = None,
        scale: float = 1.0,
        reverse: bool = False,
        bidirectional: bool = False,
        initial_state: Optional[Tensor] = None,
        output_state: bool = False,
        chunk: int = 64,
        backend: str = 'auto',
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Compute y_t = Re(m_t' s_t) scale with the memory m_t = o_t * m_{t-1} + e_t i_t' (K x D) along each line.

    The oscillation is o = exp(log_o_k + log_o_d + log_o) e^{i theta}, where log_o_k is the same for all columns of the
    memory and log_o_d for all rows; without any of them it is 1, which is linear attention without normalization.
    Oscillations of rank one (log_o_k, log_o_d, theta of rows) are computed by products of chunks, all others by a loop
    over tokens that never stores o. On a CPU, 'portable' also takes a loop if B H is at least 128, K D at most 2 and T
    at most 1,024.

    Args:
        i: input, shape (B, H, T, D); float32, float64, float16 or bfloat16; any strides. D is the width of a value.
        e, s: expand and shrink, shape (B, H, T, K), dtype of i; or (H, K, D), constant in time, which multiply the
            memory elementwise: m[k, d] takes e[k, d] i[d] and y[d] = sum_k s[k, d] m[k, d]. With theta they may be
            complex, of i's precision.
        log_o_k: step logs <= 0 of the memory's rows, shape (B, H, T, K), (B, H, T, 1), (H, K) or (H, 1). Step logs are
            clamped to [-80, 0] (positive ones raise an error where they can be read), and clamped values have no
            gradient.
        log_o_d: the same of the memory's columns, with D instead of K.
        log_o: step logs of full rank, shape (H, K, D), or (B, H, T, K, D) where the caller has them in memory.
        theta: angles, shape (B, H, T, K), (B, H, T, 1), (H, K), (H, 1) or (H, K, D). If e, s and the
            oscillation are constant, the recurrence is a convolution. Otherwise, an angle for each element, or e or s
            of shape (H, K, D), takes memory for T x K x D numbers, and graphs take it for constant ones too.
        generator: a decay of full rank by its factors, see `DecayGenerator`, instead of log_o.
        scale: factor of the output.
        reverse: run from the last token to the first: the result equals that of flipped arguments, flipped.
        bidirectional: the sum of both directions with the term of t itself, (s_t' e_t) i_t, counted once.
        initial_state: memory before the first token, shape (B, H, K, D), or None for zeros; complex with theta.
        output_state: also return the memory after the last token (with reverse: after the first).
        chunk: tokens of a chunk on longer lines: 16, 32, 64 or 128. For oscillations of rank one, 'portable' and
            'export' take lines of up to 64 tokens as one chunk. 'triton' takes lines of up to 64 tokens as one chunk
            in float16 and bfloat16, and chunks of at most 32 tokens on longer lines; in float32 and float64 these are
            32 and 16. Not used by 'reference' and 'fla', by loops over tokens, by theta with constant e, s and
            oscillation outside of graphs, and by 'portable' and 'triton' for both directions without oscillation.
        backend: 'auto', 'triton', 'portable', 'reference', 'export', or 'fla' for the operators of fla-core, which
            must be installed.

    Returns:
        y, of the shape and dtype of i; with output_state also the memory (B, H, K, D), in float32 or, for float64,
        float64; complex with theta.

    Raises:
        ValueError: a shape, device, size, name or combination of arguments is not allowed, or the tensors exceed the
            memory. On a CPU, outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    op = 'eos_elementwise'
    keys = check_keys(op, i, e=e, s=s)
    oscillation = Oscillation(log_o_k, log_o_d, log_o, theta, generator)
    check_oscillation(op, oscillation, i, e, s, keys)
    check_run(op, i, keys, scale, reverse, bidirectional, initial_state, output_state, chunk, theta is not None)
    tensors = tensors_of(i, e, s, oscillation, initial_state)
    run = choose(op, backend, *tensors)
    with without_autocast(i):
        if i.numel() == 0:
            y, state = unchanged(i, tensors[1:], keys, initial_state, theta is not None)
        else:
            y, state = run(i, e, s, oscillation, scale, direction_name(reverse, bidirectional), initial_state,
                           output_state, chunk)
    return (y, state) if output_state else y
