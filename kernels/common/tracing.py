"""Whether a graph is exported or traced, and whether a tensor belongs to a trace or a transform."""
import torch
from torch import Tensor


def exporting() -> bool:
    """True while torch.export or torch.jit.trace records a graph; the ONNX exporter uses one of the two."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_traced_or_wrapped(x: Tensor) -> bool:
    """True for traced or functorch-wrapped tensors; do not cache, mutate or read them."""
    return (torch.compiler.is_compiling() or exporting() or type(x) is not Tensor
            or torch._C._functorch.is_functorch_wrapped_tensor(x))
