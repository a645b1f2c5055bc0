"""Triton kernel of the step logs of polyline attention (PPMA, section 3), for both directions in one launch:

    log_alpha[i, j] = -exp(a_log) softplus(z[i, j]) / scale,    S[i, j] = sum_{l <= j} log_alpha[i, l]

and likewise log_beta from its channels of z, with sums along columns. A program takes some lines of one head, piece by
piece, and carries the sums of the pieces before.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.numerics import STEP_LOG_MIN
from ..common.tiles import softplus

# Lines of a program, the most tokens of a piece, and warps.
LINES, LARGEST_BLOCK, WARPS = 16, 64, 4
LEAST_STEP = tl.constexpr(STEP_LOG_MIN)


@triton.jit(do_not_specialize=['heads', 'height', 'width', 'vertical', 'z_b', 'z_i', 'z_j'])
def _path_sums_fwd_kernel(z, a_log, out, per_scale, heads, height, width, vertical, z_b, z_i, z_j, SUMS: tl.constexpr,
                          LINES: tl.constexpr, BLOCK: tl.constexpr):
    """Compute LINES rows (in the first half of the programs) or columns (in the second) of one head per program.

    vertical: the channel of z at which the vertical steps begin."""
    down = tl.program_id(0) // (tl.num_programs(0) // 2)
    program = tl.program_id(0) % (tl.num_programs(0) // 2)
    blocks = tl.cdiv(tl.maximum(height, width), LINES)
    group = program // blocks
    batch, head = (group // heads).to(tl.int64), group % heads
    lines = tl.where(down == 1, width, height)
    length = tl.where(down == 1, height, width)
    line = program % blocks * LINES + tl.arange(0, LINES)
    z += batch * z_b + tl.where(down == 1, vertical, 0) + head
    out += (down.to(tl.int64) * (tl.num_programs(0) // 2 // blocks) + group) * height * width
    rate = tl.exp(tl.load(a_log + head).to(tl.float32)) * -per_scale
    carried = tl.zeros((LINES,), tl.float64)
    for start in range(0, length, BLOCK):
        n = start + tl.arange(0, BLOCK)
        mask = (line < lines)[:, None] & (n < length)[None, :]
        i = tl.where(down == 1, n[None, :], line[:, None])
        j = tl.where(down == 1, line[:, None], n[None, :])
        x = tl.load(z + i.to(tl.int64) * z_i + j * z_j, mask=mask, other=0.0).to(tl.float32)
        steps = rate * softplus(x)
        steps = tl.where(mask, tl.maximum(steps, LEAST_STEP), 0.0)
        if SUMS:
            sums = tl.cumsum(steps.to(tl.float64), 1) + carried[:, None]
            carried += tl.sum(steps.to(tl.float64), 1)
            steps = sums.to(tl.float32)
        tl.store(out + i * width + j, steps, mask=mask)


def forward(z: Tensor, a_log: Tensor, scale: float, sums: bool) -> Tensor:
    """Return horizontal and vertical step logs or sums, (2, B, heads, H, W) in float32."""
    z, a_log = launch.unit_stride(z), a_log.contiguous()
    batch, height, width, channels = z.shape
    heads = len(a_log)
    launch.check_grid(z)
    out = z.new_empty((2, batch, heads, height, width), dtype=torch.float32)
    blocks = launch.cdiv(max(height, width), LINES)
    if out.numel():
        _path_sums_fwd_kernel[launch.programs(2 * batch * heads * blocks)](
            z, a_log, out, 1 / scale, heads, height, width, channels - heads, *z.stride()[:3], SUMS=sums, LINES=LINES,
            BLOCK=min(LARGEST_BLOCK, launch.padded_power_of_two(max(height, width))), num_warps=WARPS)
    return out
