"""int8 quantization of a graph after training (pt2e), for XNNPACK."""
from typing import Sequence

import torch
from torch import Tensor

from ..common.cli import UserError

aten = torch.ops.aten
# What is quantized. Norms, softmax and attention keep float32: their values span ranges that 8 bits do not cover.
QUANTIZED = (aten.conv2d.default, aten.linear.default)


def quantized(program: torch.export.ExportedProgram, images: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """Quantize the inputs, weights and outputs of convolutions and linear layers.

    Weights are symmetric int8 with a scale for each output channel; inputs and outputs are int8 with one scale and
    zero point each, from the ranges that the images give.

    Args:
        program: The graph, with constant weights.
        images: Calibration images (1, C, H, W), float32.

    Raises:
        UserError: There are no images, or one has another shape than the graph takes.
    """
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    if not images:
        raise UserError('int8 needs calibration images, which show the ranges of the values')
    example = program.example_inputs[0][0]
    for image in images:
        if image.shape[1:] != example.shape[1:]:
            raise UserError(f'calibration images must be (1, {", ".join(map(str, example.shape[1:]))}), '
                            f'got {tuple(image.shape)}')
    quantizer, config = XNNPACKQuantizer(), get_symmetric_quantization_config(is_per_channel=True)
    for operator in QUANTIZED:
        quantizer.set_operator_type(operator, config)
    with torch.no_grad():
        prepared = prepare_pt2e(program.module(check_guards=False), quantizer)
        for image in images:
            prepared(image)
        converted = convert_pt2e(prepared)
        return torch.export.export(converted, (example,), dynamic_shapes=_dynamic_shapes(program))


def _dynamic_shapes(program: torch.export.ExportedProgram):
    """Return the argument of torch.export for the batch of a program; None if its sizes are fixed."""
    images = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    batch = images.meta['val'].shape[0]
    if isinstance(batch, int):
        return None
    limits = program.range_constraints[batch.node.expr]
    return ({0: torch.export.Dim('batch', min=int(limits.lower), max=int(limits.upper))},)
