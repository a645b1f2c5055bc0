"""Inference on a CPU: a batch a few images at a time, in memory that is taken once."""
from functools import cache
from typing import Callable

import torch
from torch import Tensor, nn

from ..kernels.dispatch import exporting

# Elements of the token map worked on at a time (4 images of 224 x 224 at PPMA-T's stride 4): 3.2 MB in float32.
PART_ELEMENTS = 800_000


def plain_inference(x: Tensor) -> bool:
    """Whether x is worked on eagerly, without gradients, on a CPU: loops and memory written in place do no harm."""
    return (x.device.type == 'cpu' and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
            and not exporting())


def in_parts(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, elements: int) -> Tensor:
    """forward(x), in eager inference on a CPU a few images of the batch at a time.

    There fresh memory and cache misses cost more than arithmetic (measured with PPMA-T: a fifth of the time of a batch
    of 32). Elsewhere the batch stays whole: a graph must not contain the loop, BatchNorm in training must see the
    batch, and a GPU wants as much as it can get.

    Args:
        module: the module whose `forward` runs; in training mode the batch stays whole.
        forward: (B, ...) -> (B, ...), each image for itself.
        x: (B, ...).
        elements: size of one image's token map.
    """
    if not isinstance(x, Tensor) or module.training or not plain_inference(x) or _hooked(module):
        return forward(x)
    _keep_freed_memory()
    images = max(1, PART_ELEMENTS // max(1, elements))
    return forward(x) if len(x) <= images else torch.cat([forward(part) for part in x.split(images)])


def _hooked(module: nn.Module) -> bool:
    """Whether anybody listens to a part of the module, and would be told of a few images at a time."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


@cache
def _keep_freed_memory() -> None:
    """Teach the C allocator to keep up to 62 MB of freed memory, which it would give back to the kernel after each
    block and take again page by page.

    glibc's thresholds follow the largest block freed so far (mallopt(3), M_MMAP_THRESHOLD): free one of 31 MB, unused.
    """
    torch.empty(31 * 2 ** 20, dtype=torch.uint8)
