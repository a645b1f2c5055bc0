"""Lower the precision of an ONNX model: float16, and int8 by static quantization."""
import copy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Dict, List, Sequence

import numpy as np
import onnx
import onnx_ir
from onnx import ModelProto, numpy_helper

from .onnx_graph import remove_unused

# Sums over many numbers, and exponentials, whose results or intermediate values leave the range of float16; and Gelu,
# which ONNX Runtime would replace by its formula, because it has no kernel for float16.
FLOAT32_OPERATORS = (
    'CumSum', 'Exp', 'Gelu', 'InstanceNormalization', 'LayerNormalization', 'ReduceMean', 'ReduceSum', 'Resize',
    'Softmax', 'Softplus',
)
# Operators with weights, which hold the memory and the time of these networks, and those of SiLU between them.
INT8_OPERATORS = ('Conv', 'Gemm', 'MatMul', 'Mul', 'Sigmoid')


def halve(model: ModelProto) -> ModelProto:
    """Return the model in float16, with inputs, outputs and `FLOAT32_OPERATORS` in float32."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16
    half = convert_float_to_float16(copy.deepcopy(model), keep_io_types=True,
                                    op_block_list=[*DEFAULT_OP_BLOCK_LIST, *FLOAT32_OPERATORS])
    del half.graph.value_info[:]
    half = onnx_ir.from_proto(half)
    half.graph.sort()                              # a cast can stand after the operator that takes it
    return onnx_ir.to_proto(half)


def quantize(model: ModelProto, inputs: Sequence[Dict[str, np.ndarray]]) -> ModelProto:
    """Return the model with weights in int8 (7 bits used, one scale for each output channel) and activations in uint8.

    Quantization stands in the graph as pairs of QuantizeLinear and DequantizeLinear (QDQ), which a runtime fuses with
    the operator between them. Convolutions, linear layers and SiLU are quantized. All else stays in float32: norms,
    softmax, decays, products of activations, and the outputs. `inputs` are inputs by name, from
    which the ranges of the activations are taken.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process
    readings = iter(inputs)
    with tempfile.TemporaryDirectory() as folder:
        prepared, result = Path(folder, 'prepared.onnx'), Path(folder, 'int8.onnx')
        quant_pre_process(model, str(prepared))
        quantize_static(
            str(prepared),
            str(result),
            SimpleNamespace(get_next=lambda: next(readings, None)),    # what the calibrator calls
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(INT8_OPERATORS),
            nodes_to_exclude=_kept_in_float(onnx.load(prepared)),
            per_channel=True,
            reduce_range=True,                     # 7 bits: x86 without VNNI saturates sums of two 8-bit products
            activation_type=QuantType.QUInt8,      # with QInt8, ONNX Runtime leaves most convolutions in float32
            weight_type=QuantType.QInt8,
        )
        quantized = onnx.load(result)
    _keep_outputs(quantized)
    del quantized.graph.value_info[:], quantized.metadata_props[:]
    remove_unused(quantized)
    return quantized


def _kept_in_float(model: ModelProto) -> List[str]:
    """Return the names of operators of the types `INT8_OPERATORS` that stay in float32.

    These are products of activations, such as those of attention and of decays; convolutions and matrix products that
    repeat or rotate channels by matrices of 0, 1 and -1; and sigmoids outside of SiLU.
    """
    weights = {tensor.name for tensor in model.graph.initializer
               if len(tensor.dims) > 1 and len(np.unique(numpy_helper.to_array(tensor).flat[:4096])) > 3}
    trained = {node.name for node in model.graph.node
               if node.op_type in ('Conv', 'Gemm', 'MatMul') and weights.intersection(node.input[:2])}
    sigmoids = {node.output[0]: node for node in model.graph.node if node.op_type == 'Sigmoid'}
    silu = set()
    for node in model.graph.node:
        for gate, x in (node.input, reversed(node.input)) if node.op_type == 'Mul' else ():
            if gate in sigmoids and sigmoids[gate].input[0] == x:
                silu.update((node.name, sigmoids[gate].name))
    return [node.name for node in model.graph.node
            if node.op_type in INT8_OPERATORS and node.name not in trained | silu]


def _keep_outputs(model: ModelProto) -> None:
    """Return outputs of the graph before they are rounded, in place."""
    producers = {name: node for node in model.graph.node for name in node.output}
    for value in model.graph.output:
        restored = producers.get(value.name)
        rounded = restored and producers.get(restored.input[0])
        if rounded is None or (restored.op_type, rounded.op_type) != ('DequantizeLinear', 'QuantizeLinear'):
            continue
        exact = rounded.input[0]
        for node in model.graph.node:
            for names in (node.input, node.output):
                for n, name in enumerate(names):
                    names[n] = {exact: value.name, value.name: f'{value.name}_rounded'}.get(name, name)
