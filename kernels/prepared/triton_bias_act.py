"""Triton kernel of act(x + bias) for channels-last results of cuDNN, whose convolutions leave both to other launches.

PyTorch adds the bias one number at a time, and takes twice as long for it as reading and writing the map takes.
"""
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.tiles import gelu

BLOCK, WARPS = 2048, 4


@triton.jit(do_not_specialize=['size'])
def _bias_act_fwd_kernel(x, bias, out, size, DIM: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK numbers per program."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < size
    y = tl.load(x + n, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(bias + n % DIM, mask=mask, other=0.0).to(tl.float32)
    if ACT == 'gelu':
        y = gelu(y)
    if ACT == 'silu':
        y = y * tl.sigmoid(y)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=mask)


def forward(x: Tensor, bias: Tensor, act: str) -> Tensor:
    """Return act(x + bias), dense."""
    x, bias = x.contiguous(), bias.contiguous()
    out = x.new_empty(x.shape)
    if size := x.numel():
        _bias_act_fwd_kernel[launch.programs(launch.cdiv(size, BLOCK))](
            x, bias, out, size, DIM=x.shape[-1], ACT=act, BLOCK=BLOCK, num_warps=WARPS)
    return out
