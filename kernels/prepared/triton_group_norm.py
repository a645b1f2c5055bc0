"""Triton kernels of the norm of images (group norm with one group) on channels-last tokens. With means over an image,

    s = x + add,    y = (s - mean s) / sqrt(mean (s - mean s)^2 + eps) weight + bias

The first kernel stores s, and the mean and the sum of squared deviations of each part of an image. Parts combine as

    mean = sum_p n_p mean_p / n,    deviations = sum_p deviations_p + n_p (mean_p - mean)^2

(Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances", 1979), which the second
kernel does in every program. PyTorch's group norm copies channels-last images to channels-first ones and back.
"""
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch

# Numbers of a block, parts of an image, and blocks that make another part worth a program.
BLOCK, PARTS, WARPS = 2048, 64, 4


@triton.jit(do_not_specialize=['parts', 'chunk'])
def _group_norm_statistics_fwd_kernel(x, add, ahead, total, partial, size, parts, chunk, DIM: tl.constexpr,
                                      BLOCK: tl.constexpr):
    """Reduce `chunk` blocks of one image per program. size: numbers of an image. partial: (2, images, parts)."""
    image, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    count, mean, deviations = 0.0, 0.0, 0.0
    for step in range(chunk):
        n = (part * chunk + step).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = n < size
        s = tl.load(x + image * size + n, mask=mask, other=0.0).to(tl.float32)
        if add is not None:
            s += tl.load(add + image * size + n, mask=mask, other=0.0).to(tl.float32)
            later = s
            if ahead is not None:
                later += tl.load(ahead + n % DIM, mask=mask, other=0.0).to(tl.float32)
            tl.store(total + image * size + n, later.to(total.dtype.element_ty), mask=mask)
        new = tl.sum(mask.to(tl.float32), 0)
        of_block = tl.sum(s, 0) / tl.maximum(new, 1.0)
        centered = tl.where(mask, s - of_block, 0.0)
        share = new / tl.maximum(count + new, 1.0)
        deviations += tl.sum(centered * centered, 0) + (of_block - mean) * (of_block - mean) * count * share
        mean += (of_block - mean) * share
        count += new
    tl.store(partial + tl.program_id(0), mean)
    tl.store(partial + tl.num_programs(0) + tl.program_id(0), deviations)


@triton.jit(do_not_specialize=['parts', 'chunk', 'images'])
def _group_norm_fwd_kernel(x, add, weight, bias, partial, y, images, size, parts, chunk, eps, DIM: tl.constexpr,
                           BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Normalize one block of an image per program."""
    blocks = tl.cdiv(size, BLOCK)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    p = tl.arange(0, PARTS)
    means = tl.load(partial + image * parts + p, mask=p < parts, other=0.0)
    deviations = tl.load(partial + (images + image) * parts + p, mask=p < parts, other=0.0)
    counts = tl.minimum(tl.maximum(size - p * chunk * BLOCK, 0), chunk * BLOCK).to(tl.float32)
    mean = tl.sum(counts * means, 0) / size
    deviations += counts * (means - mean) * (means - mean)
    scale = tl.rsqrt(tl.sum(deviations, 0) / size + eps)
    n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < size
    s = tl.load(x + image * size + n, mask=mask, other=0.0).to(tl.float32)
    if add is not None:
        s += tl.load(add + image * size + n, mask=mask, other=0.0).to(tl.float32)
    s = (s - mean) * scale * tl.load(weight + n % DIM, mask=mask, other=0.0).to(tl.float32)
    s += tl.load(bias + n % DIM, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + image * size + n, s.to(y.dtype.element_ty), mask=mask)


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, add: Optional[Tensor] = None,
            ahead: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """Return the norm of the sum and, with `add`, the sum plus `ahead`."""
    x, weight, bias, add, ahead = (None if z is None else z.contiguous() for z in (x, weight, bias, add, ahead))
    y, total = x.new_empty(x.shape), x.new_empty(x.shape if add is not None else 0)
    if not x.numel():
        return y, total
    launch.check_grid(x)
    images, dim = len(x), x.shape[-1]
    size = x.numel() // images
    blocks = launch.cdiv(size, BLOCK)
    chunk = launch.cdiv(blocks, PARTS)
    parts = launch.cdiv(blocks, chunk)
    partial = x.new_empty((2, images, parts), dtype=torch.float32)
    _group_norm_statistics_fwd_kernel[launch.programs(images * parts)](
        x, add, ahead, total, partial, size, parts, chunk, DIM=dim, BLOCK=BLOCK, num_warps=WARPS)
    _group_norm_fwd_kernel[launch.programs(images * blocks)](
        x, add, weight, bias, partial, y, images, size, parts, chunk, eps, DIM=dim, BLOCK=BLOCK, PARTS=PARTS,
        num_warps=WARPS)
    return y, total
