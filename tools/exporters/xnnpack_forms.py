"""Rewrite a graph with operators that XNNPACK takes, because any other operator ends a delegated part.

XNNPACK has no norms over groups or layers, no sums, no expansion and no softplus. Its convolutions need constant
weights. `FORMS` computes such operators from others, where shapes are static; the values change by rounding only.
Other formats keep the operators, which their runtimes have.
"""
import itertools
import math
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument

from .graph import LARGEST_RANK

aten = torch.ops.aten
_ROW = 256                      # largest number of values that one row of a linear layer averages


def rewrite(program: ExportedProgram) -> ExportedProgram:
    """Replace operators by their forms for XNNPACK and compute constants, such as weights with a fused increment."""
    return _folded(program.run_decompositions(dict(FORMS)))


def fold_constants(program: ExportedProgram) -> ExportedProgram:
    """Compute what depends on weights only."""
    return _folded(program.run_decompositions({}))


def _folded(program: ExportedProgram) -> ExportedProgram:
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass
    program = _renamed(constant_prop_pass(program, custom_skip_targets=_kept()))
    # ExecuTorch takes a constant that is permuted in memory for a channels-last image.
    for name, tensor in program.constants.items():
        if isinstance(tensor, Tensor):
            program.constants[name] = tensor.contiguous()
    for node in program.graph.find_nodes(op='placeholder'):
        if node.name not in program.graph_signature.user_inputs and isinstance(node.meta.get('val'), Tensor):
            node.meta['val'] = node.meta['val'].contiguous()
    return program


def _renamed(program: ExportedProgram) -> ExportedProgram:
    """Give constants that were computed new names.

    The pass that computes them numbers their names. When it runs again after a program has become a module and a
    program again, as for quantization, it can give a number twice, because it then sees only some of the names.
    """
    taken = {*program.state_dict, *program.constants}
    numbers = (n for n in itertools.count() if f'folded_{n}' not in taken)
    for spec in program.graph_signature.input_specs:
        if spec.target in program.constants and spec.target.startswith('_prop_tensor_constant'):
            name = f'folded_{next(numbers)}'
            program.constants[name] = program.constants.pop(spec.target)
            spec.target = name
    return program


def _kept() -> set:
    """Operators on constants that remain in the graph: those of quantization, which mark the weights of a kernel."""
    try:
        names = torch.ops.quantized_decomposed
        return {names.quantize_per_tensor.default, names.dequantize_per_tensor.default,
                names.quantize_per_channel.default, names.dequantize_per_channel.default}
    except AttributeError:
        return set()


def halved(program: ExportedProgram) -> ExportedProgram:
    """Return the program with float16 weights and values, and float32 inputs and outputs. Its weights are converted."""
    graph, signature = program.graph, program.graph_signature
    for tensors in (program.state_dict, program.constants):
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                half = tensor.detach().half()
                tensors[name] = nn.Parameter(half, False) if isinstance(tensor, nn.Parameter) else half
    for node in list(graph.nodes):
        value = node.meta.get('val')
        if 'assert' in str(node.target):
            graph.erase_node(node)
        elif node.op == 'call_function':
            node.args = tuple(map(_half_type, node.args))
            node.kwargs = {name: _half_type(argument) for name, argument in node.kwargs.items()}
        elif node.op == 'placeholder' and isinstance(value, Tensor) and value.dtype == torch.float32:
            if node.name not in signature.user_inputs:
                node.meta['val'] = value.half()
                continue
            with graph.inserting_after(node):
                half = graph.call_function(aten._to_copy.default, (node,), {'dtype': torch.float16})
            node.replace_all_uses_with(half, lambda user, half=half: user is not half)
        elif node.op == 'output':
            _float_outputs(program, node)
    return rewrite(program)


def _half_type(argument: Any) -> Any:
    return torch.float16 if argument is torch.float32 else argument


def _float_outputs(program: ExportedProgram, output: torch.fx.Node) -> None:
    """Convert the outputs of a graph to float32, and name the new nodes in its signature."""
    outputs = list(output.args[0])
    for n, node in enumerate(outputs):
        if node.meta['val'].dtype == torch.float32:
            with program.graph.inserting_before(output):
                outputs[n] = program.graph.call_function(aten._to_copy.default, (node,), {'dtype': torch.float32})
            outputs[n].meta['val'] = node.meta['val']
            program.graph_signature.output_specs[n].arg = TensorArgument(name=outputs[n].name)
    output.args = (tuple(outputs),)


def _static(*sizes: object) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _constant(x: Tensor, shape: Sequence[int], value: float) -> Tensor:
    return torch.full(shape, value, dtype=x.dtype, device=x.device)


def _reshape(x: Tensor, shape: Sequence[Any]) -> Tensor:
    """Reshape to sizes of which one may be dynamic."""
    return x.reshape([size if isinstance(size, int) else -1 for size in shape])


def _reshapable(shape: Sequence[Any]) -> bool:
    return sum(not isinstance(size, int) for size in shape) < 2


def _mean(x: Tensor, dims: Optional[Sequence[int]], keepdim: bool = False, *, dtype: Optional[torch.dtype] = None):
    axes = {n % x.ndim for n in dims or ()}
    if dtype is not None:
        return NotImplemented
    if axes == {2, 3} and x.ndim == 4 and not keepdim:
        return x.mean((2, 3), keepdim=True).reshape(-1, x.shape[1])
    return _last(x, 1 / x.shape[-1], keepdim) if axes == {x.ndim - 1} and _static(x.shape[-1]) else NotImplemented


def _last(x: Tensor, factor: float, keepdim: bool):
    """Sum over the last dimension, times a factor."""
    y = F.linear(x, _constant(x, (1, x.shape[-1]), factor))
    if keepdim:
        return y
    return _reshape(y, x.shape[:-1]) if _reshapable(x.shape[:-1]) else NotImplemented


def _sum(x: Tensor, dims: Optional[Sequence[int]], keepdim: bool = False, *, dtype: Optional[torch.dtype] = None):
    last = dims is not None and [n % x.ndim for n in dims] == [x.ndim - 1]
    if not last or dtype is not None or not x.is_floating_point() or not _static(x.shape[-1]):
        return NotImplemented
    return _last(x, 1.0, keepdim)


def _softmax(x: Tensor, dim: int, dtype: Any = None):
    """Compute it along the last dimension of a tensor of rank 3.

    Behind a convolution, ExecuTorch 1.5.1 keeps tensors of rank 4 channels-last, and its softmax runs over channels.
    """
    if (x.ndim != 4 and dim % x.ndim == x.ndim - 1) or dtype not in (None, False, x.dtype):
        return NotImplemented
    if x.ndim != 4 or not _static(*x.shape[1:]):
        return NotImplemented
    last = dim % 4 == 3
    y = x if last else x.transpose(dim, -1)
    y = y.reshape(-1, y.shape[1] * y.shape[2], y.shape[3]).softmax(-1).reshape(-1, *y.shape[1:])
    return y if last else y.transpose(dim, -1).contiguous()


def _affine(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _group_norm(x: Tensor, groups: int, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None,
                eps: float = 1e-5, cudnn_enabled: bool = True):
    if x.ndim == 3 and groups == x.shape[1] == 1 and weight is bias is None and _static(x.shape[2]):
        return _norm_of_one_channel(x, eps)
    if x.ndim != 4 or groups != 1 or not _static(*x.shape[1:]):
        return NotImplemented

    def mean(y: Tensor) -> Tensor:
        """Return the mean over channels of the means over positions, (B, 1, 1, 1)."""
        return y.mean((2, 3), keepdim=True).reshape(-1, 1, x.shape[1], 1).mean((2, 3), keepdim=True)

    centered = x - mean(x)
    y = centered * (mean(centered * centered) + eps).rsqrt()
    return _affine(y, *(None if p is None else p.reshape(1, -1, 1, 1) for p in (weight, bias)))


def _norm_of_one_channel(x: Tensor, eps: float) -> Tensor:
    """Normalize (B, 1, N): means of rows by a linear layer, then of their means. A pooling of one channel is slow."""
    length = x.shape[2]
    width = math.gcd(length, _ROW)
    rows, average = length // width, _constant(x, (1, width), 1 / width)

    def mean(y: Tensor) -> Tensor:
        return F.linear(y, average).reshape(-1, 1, rows, 1).mean((2, 3), keepdim=True).reshape(-1, 1, 1)

    x = x.reshape(-1, rows, width)
    centered = x - mean(x)
    return (centered * (mean(centered * centered) + eps).rsqrt()).reshape(-1, 1, length)


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Optional[Tensor] = None, bias: Optional[Tensor] = None,
                eps: float = 1e-5, cudnn_enable: bool = True):
    if len(shape) != 1 or not _static(*shape):
        return NotImplemented
    average = _constant(x, (1, shape[0]), 1 / shape[0])
    centered = x - F.linear(x, average)
    return _affine(centered * (F.linear(centered * centered, average) + eps).rsqrt(), weight, bias)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0):
    return x.relu() + ((-x.abs()).exp() + 1.0).log() if beta == 1 else NotImplemented


def _gelu(x: Tensor, approximate: str = 'none'):
    """XNNPACK has no GELU in half precision; tanh differs by less than half precision rounds."""
    if x.dtype != torch.float16:
        return NotImplemented
    inner = x * (x * x * (0.044715 * math.sqrt(2 / math.pi)) + math.sqrt(2 / math.pi))
    return x * 0.5 * (inner.tanh() + 1.0)


def _cumsum(x: Tensor, dim: int, *, dtype: Optional[torch.dtype] = None):
    length = x.shape[dim]
    if dtype is not None or not x.is_floating_point() or not _static(length):
        return NotImplemented
    below = _constant(x, (length, length), 1.0).tril()
    if dim % x.ndim == x.ndim - 1:
        return F.linear(x, below)
    # Views after the operator, which quantization fixes before this rewriting, need its memory layout.
    return F.linear(x.transpose(dim, -1), below).transpose(dim, -1).contiguous()


def _grow(x: Tensor, factors: Sequence[int]) -> Tensor:
    """Repeat x along dimensions of size 1."""
    return x if all(n == 1 for n in factors) else x * _constant(x, factors, 1.0)


def _expand(x: Tensor, size: Sequence[Any], *, implicit: bool = False):
    before = [1] * (len(size) - x.ndim) + list(x.shape)
    if not x.is_floating_point() or len(size) > LARGEST_RANK or not _reshapable(before):
        return NotImplemented
    factors: List[Any] = [1 if not (_static(have) and have == 1) or (_static(want) and want == -1) else want
                          for have, want in zip(before, size)]
    if not _static(*factors):
        return NotImplemented
    return _grow(x if len(size) == x.ndim else _reshape(x, before), factors)


def _repeat(x: Tensor, repeats: Sequence[Any]):
    axes = [axis for axis, count in enumerate(repeats) if not (_static(count) and count == 1)]
    if len(repeats) != x.ndim or len(axes) != 1 or not x.is_floating_point() or not _reshapable(x.shape):
        return NotImplemented
    axis = axes[0]
    rest = x.shape[axis:]
    if not _static(repeats[axis], *rest):
        return NotImplemented
    y = _grow(x.reshape(-1, 1, math.prod(rest)), [1, repeats[axis], 1])
    return _reshape(y, [*x.shape[:axis], repeats[axis] * rest[0], *rest[1:]])


def _unsqueeze(x: Tensor, dim: int):
    dim %= x.ndim + 1
    shape = [*x.shape[:dim], 1, *x.shape[dim:]]
    return _reshape(x, shape) if _reshapable(shape) else NotImplemented


def _select(x: Tensor, dim: int, index: Any):
    dim %= x.ndim
    shape = [*x.shape[:dim], *x.shape[dim + 1:]]
    if not _static(x.shape[dim], index) or not _reshapable(shape):
        return NotImplemented
    return _reshape(x.narrow(dim, index % x.shape[dim], 1), shape)


def _split_with_sizes(x: Tensor, sizes: Sequence[Any], dim: int = 0):
    if not _static(*sizes, x.shape[dim]):
        return NotImplemented
    return [x.narrow(dim, sum(sizes[:n]), size) for n, size in enumerate(sizes)]


def _split(x: Tensor, size: Any, dim: int = 0):
    length = x.shape[dim]
    if not _static(size, length):
        return NotImplemented
    return _split_with_sizes(x, [min(size, length - start) for start in range(0, length, size)], dim)


def _avg_pool2d(x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0, 0),
                ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: Optional[int] = None):
    """Padding, ceil mode and another divisor by a pad and a factor."""
    kernel, stride, padding = ([*values, *values] if len(values) == 1 else list(values)
                               for values in (kernel, stride or kernel, padding))
    plain = not ceil_mode and divisor_override is None and not any(padding)
    if plain or divisor_override is None and (ceil_mode or not count_include_pad) or not _static(*x.shape[-2:]):
        return NotImplemented
    pads: List[int] = []
    for size, k, step, pad in zip(x.shape[-2:], kernel, stride, padding):
        windows = (size + 2 * pad - k + (step - 1 if ceil_mode else 0)) // step + 1
        windows -= ceil_mode and (windows - 1) * step >= size + pad           # a window of padding only
        pads = [pad, max(0, (windows - 1) * step + k - size - pad), *pads]
    y = F.avg_pool2d(F.pad(x, pads) if any(pads) else x, kernel, stride)
    return y if divisor_override is None else y * (kernel[0] * kernel[1] / divisor_override)


def _nearest(x: Tensor, size: Optional[Sequence[int]], scales: Optional[Sequence[float]]):
    factors = [int(scale) for scale in scales or ()]
    if size is not None or [*(scales or ())] != factors or not factors or not _static(*x.shape[1:]):
        return NotImplemented
    channels, height, width = x.shape[1:]
    y = _grow(x.reshape(-1, width, 1), [1, 1, factors[1]])
    y = _grow(y.reshape(-1, 1, width * factors[1]), [1, factors[0], 1])
    return y.reshape(-1, channels, height * factors[0], width * factors[1])


def _filled(value: Optional[float], new: bool = False) -> Callable:
    """Return a form of full_like (value None), ones_like or zeros_like, or of new_full and so on with their sizes.

    The form does not depend on the values of its first argument.
    """
    def form(x: Tensor, *values: Any, dtype: Optional[torch.dtype] = None, **_: Any):
        size, *values = values if new else (x.shape, *values)
        if not _static(*size):
            return NotImplemented
        return torch.full(size, values[0] if value is None else value, dtype=dtype or x.dtype, device=x.device)
    return form


FORMS: Dict[Any, Callable] = {
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _sum,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.group_norm.default: _group_norm,
    aten.layer_norm.default: _layer_norm,
    aten.softplus.default: _softplus,
    aten.gelu.default: _gelu,
    aten.silu.default: lambda x: x * x.sigmoid(),     # PyTorch's decomposition leaves half precision
    aten.cumsum.default: _cumsum,
    aten.reciprocal.default: lambda x: _constant(x, (1,), 1.0) / x if x.is_floating_point() else NotImplemented,
    aten.log1p.default: lambda x: (x + 1.0).log(),
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.unsqueeze.default: _unsqueeze,
    aten.select.int: _select,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.split.Tensor: _split,
    aten.avg_pool2d.default: _avg_pool2d,
    aten.upsample_nearest2d.vec: _nearest,
    aten.mv.default: lambda x, vector: F.linear(x, vector[None]).reshape(-1),
    aten.alias.default: lambda x: x,
    aten.full_like.default: _filled(None),
    aten.ones_like.default: _filled(1.0),
    aten.zeros_like.default: _filled(0.0),
    aten.new_full.default: _filled(None, new=True),
    aten.new_ones.default: _filled(1.0, new=True),
    aten.new_zeros.default: _filled(0.0, new=True),
}
