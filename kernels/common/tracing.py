"""Whether a graph is being exported or traced."""
import torch
from torch import Tensor


def exporting() -> bool:
    """True while torch.export or torch.jit.trace records the graph; the ONNX exporter does it by one of the two."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_traced_or_wrapped(x: Tensor) -> bool:
    """True for traced or functorch-wrapped tensors; do not cache, mutate or read them."""
    return (torch.compiler.is_compiling() or exporting() or type(x) is not Tensor
            or torch._C._functorch.is_functorch_wrapped_tensor(x))
