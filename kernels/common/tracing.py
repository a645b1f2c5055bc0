"""Whether a graph is exported or traced or a transform runs, and whether a tensor belongs to a trace or a transform."""
import torch
from torch import Tensor
from torch.autograd import forward_ad


def exporting() -> bool:
    """True while torch.export or torch.jit.trace records a graph; the ONNX exporter uses one of the two."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def forward_mode() -> bool:
    """True where tensors may carry tangents: inside torch.func.jvp, jacfwd and torch.autograd.forward_ad."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """True inside the transforms of torch.func (grad, vmap, jvp, ...) and torch.autograd.forward_ad."""
    return forward_mode() or torch._C._are_functorch_transforms_active()


def is_traced_or_wrapped(x: Tensor) -> bool:
    """True for traced or functorch-wrapped tensors; do not cache, mutate or read them."""
    return (torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing()
            or type(x) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(x))
