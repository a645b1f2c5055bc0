"""Triton kernels of depthwise convolution on channels-last tokens. With h = GELU(x) or x, in float32:

    y[i, j] = bias + sum_{m, n} w[m, n] h[i + m - K//2, j + n - K//2] (+ h[i, j]) (+ add[i, j])
    dh[i, j] = sum_{m, n} w[K-1-m, K-1-n] dy[i + m - K//2, j + n - K//2] (+ dy[i, j]),    dx = dh GELU'(x)
    dw[m, n] = sum_{i, j} dy[i, j] h[i + m - K//2, j + n - K//2],                         dbias = sum_{i, j} dy[i, j]

A program takes a block of channels of several strips of COLUMNS outputs, and goes down their rows. It loads each token
of a row once and adds it to the K output rows that need it, which it keeps in registers. So GELU is computed
(COLUMNS + K - 1) / COLUMNS times a token, not K^2 times. The gradient of x is the same kernel with its window turned by
a half-turn. The gradient of the window is summed in registers over the patches of a program, then over the programs by
`torch.sum`: no atomic operation.
"""
from typing import Dict, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.tiles import gelu

# By size of the window: columns of a strip, elements of a block for each thread, and rows that are loaded while earlier
# ones are added. 7 divides the sides of all maps of a 224 x 224 image; larger windows hold fewer columns and channels.
# They were found by timing ten choices on an H100.
STRIPS: Dict[int, Tuple[int, int, int]] = {1: (4, 4, 2), 3: (7, 2, 3), 5: (7, 2, 2), 7: (4, 2, 2)}
# Rows of a strip: many, so that few tokens are loaded by two strips, unless that leaves few programs.
STRIP_ROWS = (14, 7, 2)
# For the gradient of the window: rows and columns of a patch of outputs, elements of a block for each thread, and how
# many rows of the window a program sums.
WEIGHT_PATCHES: Dict[int, Tuple[int, int, int, int]] = {1: (1, 4, 4, 1), 3: (1, 4, 4, 3), 5: (1, 4, 2, 5),
                                                        7: (1, 4, 2, 1)}
WARPS = 4
# Enough programs to fill a GPU: two on each of 132 multiprocessors.
MANY_PROGRAMS = 264
_CHANNEL_BLOCKS = (64, 32, 16)


@triton.jit
def _gelu_derivative(x):
    return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _places(patch, count, height, width, rows, COLUMNS: tl.constexpr):
    """Return image, first row and first column of patches; those beyond `count` lie outside of the grid."""
    down, across = tl.cdiv(height, rows), tl.cdiv(width, COLUMNS)
    row = tl.where(patch < count, patch // across % down * rows, height + 64)
    return (patch // (down * across)).to(tl.int64), row, patch % across * COLUMNS


@triton.jit
def _load_token(pointer, mask, GELU: tl.constexpr):
    """Load a token of each patch, and zeros where `mask` is false, as float32: (patches, channels)."""
    x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    return gelu(x) if GELU else x


@triton.jit
def _inside(index, size):
    """Return whether 0 <= index < size, for rows or columns: (patches, 1). Negative indices are large unsigned ones."""
    return (index.to(tl.uint32, bitcast=True) < size)[:, None]


@triton.jit(do_not_specialize=['height', 'width', 'count', 'rows'])
def _depthwise_conv_fwd_kernel(
        x, weight, bias, add, before, out, x_b, x_h, x_w, a_b, a_h, a_w, g_b, g_h, g_w, height, width, channels, count,
        rows, KERNEL: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
        TURNED: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
        DERIVATIVE: tl.constexpr, STAGES: tl.constexpr):
    """Convolve BLOCK_C channels of BLOCK_P strips of `rows` x COLUMNS outputs per program. TURNED turns the window by a
    half-turn; DERIVATIVE multiplies the result by GELU'(before)."""
    PAD: tl.constexpr = KERNEL // 2
    LAST: tl.constexpr = KERNEL - 1
    blocks = tl.cdiv(channels, BLOCK_C)
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    strip = tl.program_id(0) // blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    image, top, left = _places(strip, count, height, width, rows, COLUMNS)
    bottom = tl.minimum(top + rows, height)
    x += image[:, None] * x_b + c[None, :]
    out += (image * height * width)[:, None] * channels + c[None, :]
    if ADD:
        add += image[:, None] * a_b + c[None, :]
    if DERIVATIVE:
        before += image[:, None] * g_b + c[None, :]
    taps, masks, owned = (), (), (c < channels)[None, :]
    weight += c[None, :] * (KERNEL * KERNEL)
    for n in tl.static_range(KERNEL * KERNEL):
        tap = _load_token(weight + (KERNEL * KERNEL - 1 - n if TURNED else n), owned, False)
        taps = taps + (tap + 1.0 if RESIDUAL and n == KERNEL * KERNEL // 2 else tap,)
    for s in tl.static_range(COLUMNS + LAST):
        masks = masks + (_inside(left + (s - PAD), width) & owned,)
    start = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    if BIAS:
        start += _load_token(bias + c[None, :], owned, False)
    sums = ()                                            # of the LAST output rows that have begun, the oldest first
    for _ in tl.static_range(LAST * COLUMNS):
        sums = sums + (start,)
    for t in tl.range(0, rows + LAST, num_stages=STAGES):
        row, tokens, updated = top + (t - PAD), (), ()
        line, inside = x + (row * x_h + (left - PAD) * x_w)[:, None], _inside(row, height)
        for s in tl.static_range(COLUMNS + LAST):
            tokens = tokens + (_load_token(line, inside & masks[s], GELU),)
            line += x_w
        for n in tl.static_range(KERNEL * COLUMNS):                      # output row t - LAST + n // COLUMNS
            y = start
            if n < LAST * COLUMNS:
                y = sums[n]
            for place in tl.static_range(KERNEL):
                y = tl.fma(tokens[n % COLUMNS + place], taps[(LAST - n // COLUMNS) * KERNEL + place], y)
            updated = updated + (y,)
        row = top + (t - LAST)
        inside = ((row >= top) & (row < bottom))[:, None]
        written = out + ((row * width + left) * channels)[:, None]
        if ADD:
            added = add + (row * a_h + left * a_w)[:, None]
        if DERIVATIVE:
            derived = before + (row * g_h + left * g_w)[:, None]
        for s in tl.static_range(COLUMNS):
            mask, y = inside & masks[s + PAD], updated[s]
            if ADD:
                y += _load_token(added, mask, False)
                added += a_w
            if DERIVATIVE:
                y *= _gelu_derivative(_load_token(derived, mask, False))
                derived += g_w
            tl.store(written, y.to(out.dtype.element_ty), mask=mask)
            written += channels
        sums = updated[COLUMNS:]


@triton.jit(do_not_specialize=['height', 'width', 'count', 'chunk'])
def _depthwise_conv_bwd_kernel(
        x, grad, partial, x_b, x_h, x_w, g_b, g_h, g_w, height, width, channels, count, chunk,
        KERNEL: tl.constexpr, TAP_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_P: tl.constexpr,
        BLOCK_C: tl.constexpr, GELU: tl.constexpr):
    """Sum the gradient of TAP_ROWS rows of the window and of the bias over `chunk` blocks of BLOCK_P patches per
    program. partial: (programs of a channel block, KERNEL^2 + 1, channels), float32."""
    PAD: tl.constexpr = KERNEL // 2
    TAPS: tl.constexpr = TAP_ROWS * KERNEL
    SPAN: tl.constexpr = COLUMNS + KERNEL - 1
    blocks = tl.cdiv(channels, BLOCK_C)
    groups: tl.constexpr = KERNEL // TAP_ROWS
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    first_row = tl.program_id(0) // blocks % groups * TAP_ROWS
    part = tl.program_id(0) // (blocks * groups)
    sums, owned = (), (c < channels)[None, :]
    for _ in tl.static_range(TAPS + 1):
        sums = sums + (tl.zeros((BLOCK_P, BLOCK_C), tl.float32),)
    for step in range(chunk):
        patch = (part * chunk + step) * BLOCK_P + tl.arange(0, BLOCK_P)
        image, top, left = _places(patch, count, height, width, ROWS, COLUMNS)
        of_x, of_grad = x + image[:, None] * x_b + c[None, :], grad + image[:, None] * g_b + c[None, :]
        gradients, window, masks, updated = (), (), (), ()
        for n in tl.static_range(SPAN):
            masks = masks + (_inside(left + (n - PAD), width),)
        for m in tl.static_range(ROWS):
            row = top + m
            line, inside = of_grad + (row * g_h + left * g_w)[:, None], _inside(row, height) & owned
            for n in tl.static_range(COLUMNS):
                gradients = gradients + (_load_token(line, inside & masks[n + PAD], False),)
                line += g_w
        for m in tl.static_range(ROWS + TAP_ROWS - 1):
            row = top + first_row + (m - PAD)
            line, inside = of_x + (row * x_h + (left - PAD) * x_w)[:, None], _inside(row, height) & owned
            for n in tl.static_range(SPAN):
                window = window + (_load_token(line, inside & masks[n], GELU),)
                line += x_w
        for n in tl.static_range(TAPS):
            total = sums[n]
            for place in tl.static_range(ROWS * COLUMNS):
                total = tl.fma(gradients[place], window[(place // COLUMNS + n // KERNEL) * SPAN + place % COLUMNS
                                                        + n % KERNEL], total)
            updated = updated + (total,)
        total = sums[TAPS]
        for place in tl.static_range(ROWS * COLUMNS):
            total += gradients[place]
        sums = updated + (total,)
    partial += part.to(tl.int64) * (KERNEL * KERNEL + 1) * channels + c
    for n in tl.static_range(TAPS):
        tl.store(partial + (first_row * KERNEL + n) * channels, tl.sum(sums[n], 0), mask=c < channels)
    tl.store(partial + KERNEL * KERNEL * channels, tl.sum(sums[TAPS], 0), mask=(c < channels) & (first_row == 0))


def _tiles(shape, rows: int, columns: int, elements: int) -> Tuple[int, int, int, Dict[str, int]]:
    """Return the number of patches, of blocks of patches and of blocks of channels, and constants of the kernels."""
    batch, height, width, channels = shape
    block_c = min(_CHANNEL_BLOCKS, key=lambda block: (launch.cdiv(channels, block) * block, -block))
    block_p = max(1, 32 * WARPS * elements // block_c)
    count = batch * launch.cdiv(height, rows) * launch.cdiv(width, columns)
    if launch.interpreted():                     # the interpreter takes as long for a small block as for a large one
        block_p, block_c = min(1024, launch.next_power_of_2(count)), launch.padded_power_of_two(channels)
    return count, launch.cdiv(count, block_p), launch.cdiv(channels, block_c), {
        'COLUMNS': columns, 'BLOCK_P': block_p, 'BLOCK_C': block_c}


def _options() -> Dict[str, int]:
    """Return the launch options; left alone, the compiler for sm_80 would spill to keep to 168 registers."""
    return {'num_warps': WARPS, **({'maxnreg': 255} if launch.target()[0] == 'cuda' else {})}


def _convolve(x: Tensor, weight: Tensor, bias: Optional[Tensor], add: Optional[Tensor], before: Optional[Tensor],
              turned: bool, gelu: bool, residual: bool) -> Tensor:
    """Launch the convolution of x (B, H, W, C); `before` is the input of a GELU that its result is the gradient of."""
    x, weight, out = launch.unit_stride(x), weight.contiguous(), launch.dense_like(x)
    add, before, bias = (None if tensor is None else launch.unit_stride(tensor) for tensor in (add, before, bias))
    launch.check_grid(*(tensor for tensor in (x, add, before, out) if tensor is not None))
    side, height = weight.shape[-1], x.shape[1]
    *strip, stages = STRIPS[side]
    for most in STRIP_ROWS:
        rows = launch.cdiv(height, launch.cdiv(height, most))                # strips of about equal height
        count, blocks, channel_blocks, constants = _tiles(x.shape, rows, *strip)
        if blocks * channel_blocks >= MANY_PROGRAMS:
            break
    strides = [stride for tensor in (x, add, before) for stride in (x if tensor is None else tensor).stride()[:3]]
    _depthwise_conv_fwd_kernel[launch.programs(blocks * channel_blocks)](
        x, weight, bias, add, before, out, *strides, *x.shape[1:], count, rows, KERNEL=side, TURNED=turned, GELU=gelu,
        RESIDUAL=residual, ADD=add is not None, BIAS=bias is not None, DERIVATIVE=before is not None, STAGES=stages,
        **constants, **_options())
    return out


def forward(x: Tensor, weight: Tensor, bias: Tensor, add: Optional[Tensor], gelu: bool, residual: bool) -> Tensor:
    """Return the output (B, H, W, C), dense."""
    return _convolve(x, weight, bias, add, None, False, gelu, residual)


def backward(grad: Tensor, x: Tensor, weight: Tensor, gelu: bool, residual: bool, with_input: bool,
             with_weight: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; those that are not wanted are empty."""
    dx = x.new_empty(0)
    if with_input:
        dx = _convolve(grad, weight, None, None, x if gelu else None, True, False, residual)
    if not with_weight:
        return dx, weight.new_empty(0), weight.new_empty(0)
    grad, x, side = launch.unit_stride(grad), launch.unit_stride(x), weight.shape[-1]
    launch.check_grid(grad, x)
    *patch, tap_rows = WEIGHT_PATCHES[side]
    count, blocks, channel_blocks, constants = _tiles(x.shape, *patch)
    chunk = max(1, blocks * channel_blocks // MANY_PROGRAMS)
    parts = launch.cdiv(blocks, chunk)
    partial = torch.empty(parts, side * side + 1, x.shape[3], dtype=torch.float32, device=x.device)
    _depthwise_conv_bwd_kernel[launch.programs(parts * (side // tap_rows) * channel_blocks)](
        x, grad, partial, *x.stride()[:3], *grad.stride()[:3], *x.shape[1:], count, chunk, KERNEL=side,
        TAP_ROWS=tap_rows, ROWS=patch[0], GELU=gelu, **constants, **_options())
    sums = partial.sum(0)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    dweight.view(x.shape[3], -1).copy_(sums[:-1].T)
    return dx, dweight, sums[-1].to(weight.dtype, copy=True)
