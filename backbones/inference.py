"""Inference on a CPU: a batch a few images at a time, in memory that is taken once."""
from typing import Callable

import torch
from torch import Tensor, nn

from ..kernels.common.tracing import exporting
from ..kernels.common.workspace import keep_freed_memory

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
    if not isinstance(x, Tensor) or not plain_inference(x) or _watched(module):
        return forward(x)
    keep_freed_memory()
    images = max(1, PART_ELEMENTS // max(1, elements))
    return forward(x) if len(x) <= images else torch.cat([forward(part) for part in x.split(images)])


def _watched(module: nn.Module) -> bool:
    """Whether a part of the module trains, or somebody listens to it, and would see a few images at a time."""
    return any(m.training or m._forward_hooks or m._forward_pre_hooks for m in module.modules())
