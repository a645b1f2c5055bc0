"""Write Core ML packages (ML programs). They run on Apple's systems only: elsewhere they are reloaded and checked."""
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from ..common.cli import UserError, one_line
from .formats import Conversion, Options
from .graph import LARGEST_BATCH, LARGEST_RANK, export_program, silence
from .subject import Normalize, Subject, with_normalization

_KEY = 'subquad'                 # of the metadata
_LABEL = 'label'                 # output of classifiers; coremltools appends _probs for the probabilities
_BITS = {'palette6': 6, 'palette4': 4}
# Operators that only pass their argument on. The converter does not know all of them.
_PASSED_ON = (torch.ops.aten.alias.default, torch.ops.aten.lift_fresh_copy.default)


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write an ML program for iOS 16 and macOS 13 or later.

    The input is an image. With a dynamic batch, it is a float32 tensor, since an image has no batch. A classifier that
    takes an image returns the likeliest label and all probabilities, if it has labels and no two are equal. Other
    outputs are tensors, float32 or int32.

    The arithmetic has half precision, except for cumulative sums and with fp32. With int8, weights are 8-bit integers
    with a scale for each output channel; with palettes, they are indices into 64 or 16 values for each tensor. Weights
    of at most 2048 elements keep half precision.
    """
    flexible, labels, steps = 'batch' in options.dynamic, [], {}
    if not flexible:
        subject, steps = _for_pixels(subject)
        if subject.task == 'classification' and len(set(subject.metadata['labels'])) == len(subject.metadata['labels']):
            labels = subject.metadata['labels']
    if labels:
        several = subject.metadata['postprocessing']['type'] == 'sigmoid'
        subject = replace(subject, module=_Probabilities(subject.module, several), outputs=('probabilities',))
    # The converter does not know the logarithm of a sigmoid.
    forms: Dict[Any, Any] = {torch.ops.aten.log_sigmoid.default: lambda x: -torch.nn.functional.softplus(-x)}
    if flexible:                               # the converter writes the batch of the example into group norms
        forms[torch.ops.aten.group_norm.default] = _norm_of_one_group
    program = export_program(subject, options.dynamic).run_decompositions(forms)
    for node in list(program.graph.nodes):
        if node.target in _PASSED_ON:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    kinds = [np.float32 if node.meta['val'].is_floating_point() else np.int32
             for node in program.graph.output_node().args[0]]
    given = subject.metadata['input']
    color = 'GRAYSCALE' if given['color'] == 'gray' else given['color']
    with silence():
        import coremltools as ct
        shape = (ct.RangeDim(1, LARGEST_BATCH, 1) if flexible else 1, subject.in_chans, *subject.size)
        model = ct.convert(
            program,
            convert_to='mlprogram',
            inputs=[ct.TensorType(given['name'], shape, np.float32) if flexible else
                    ct.ImageType(given['name'], shape, color_layout=ct.colorlayout[color], **steps)],
            outputs=[ct.TensorType(name=name, dtype=kind) for name, kind in zip(subject.outputs, kinds)],
            classifier_config=ct.ClassifierConfig(labels, _LABEL, *subject.outputs) if labels else None,
            compute_precision=(ct.precision.FLOAT32 if options.precision == 'fp32' else
                               ct.transform.FP16ComputePrecision(_takes_half)),
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
        model = _compressed(model, options.precision)
        metadata = dict(subject.metadata)
        if labels:
            metadata['postprocessing'] = dict(metadata['postprocessing'], in_graph=True)
            metadata['outputs'] = [dict(name=_LABEL, shape=[], dtype='string'),
                                   dict(name=f'{_LABEL}_probs', shape=[len(labels)], dtype='dictionary')]
        model.user_defined_metadata[_KEY] = json.dumps(metadata, ensure_ascii=False)
        model.short_description = f'{subject.name}: {subject.task}'
        model.save(str(path))
    operations = _operations(_reload(path))
    return Conversion(dict(Counter(operation.type for operation in operations
                                   if not operation.type.startswith('const'))))


class _Probabilities(nn.Module):
    """Return the probabilities of a classifier instead of its logits, as a tuple."""

    def __init__(self, model: nn.Module, several: bool):
        super().__init__()
        self.model, self.several = model, several

    def forward(self, images: Tensor) -> Tuple[Tensor]:
        logits = self.model(images)[0]
        return (logits.sigmoid() if self.several else logits.softmax(1),)


def _for_pixels(subject: Subject) -> Tuple[Subject, Dict[str, Any]]:
    """Return the subject that takes pixels from 0 to 255, and the scale and bias of its Core ML input.

    Core ML has one scale for all channels, so the graph multiplies by the quotients of the standard deviations. Scale
    and bias are computed in float32 in any case.
    """
    steps = subject.metadata['preprocessing']
    if steps['normalize_in_graph']:
        return subject, {}
    first, bias = steps['std'][0], [-mean / steps['std'][0] for mean in steps['mean']]
    quotients = Normalize(subject.module, dict(scale=first, mean=[0.] * len(bias), std=steps['std']))
    return (replace(with_normalization(subject), module=quotients.eval()),
            dict(scale=steps['scale'] / first, bias=bias if len(bias) > 1 else bias[0]))


def _compressed(model: Any, precision: str) -> Any:
    """Return a model with weights of 8 bits or less, or the same model if the precision has more."""
    import coremltools.optimize.coreml as compression
    if precision == 'int8':
        config = compression.OptimizationConfig(compression.OpLinearQuantizerConfig())
        return compression.linear_quantize_weights(model, config)
    if precision in _BITS:
        config = compression.OptimizationConfig(compression.OpPalettizerConfig(nbits=_BITS[precision]))
        return compression.palettize_weights(model, config)
    return model


def check(path: Path) -> None:
    """Reload a package and check its operators, their ranks and, with a dynamic batch, its shapes."""
    model = _reload(path)
    operations = _operations(model)
    with silence():
        from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry
    known = set(SSAOpRegistry.core_ops)
    unknown = sorted({operation.type for operation in operations} - known)
    if unknown or not operations:
        raise UserError(f'{path} holds operators that Core ML does not define: {", ".join(unknown) or "none at all"}')
    ranks = [output.type.tensorType.rank for operation in operations for output in operation.outputs]
    if max(ranks) > LARGEST_RANK:
        raise UserError(f'{path} holds a tensor of rank {max(ranks)}; Core ML takes {LARGEST_RANK} at most')
    if 'batch' in read_metadata(path)['input']['dynamic']:
        _check_flexible(path, operations, model.get_spec().description)


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata in the package."""
    try:
        return json.loads(_reload(path).user_defined_metadata[_KEY])
    except (KeyError, ValueError) as error:
        raise UserError(f'{path} holds no metadata of subquad') from error


def _reload(path: Path) -> Any:
    """Read a package without compiling it."""
    with silence():
        import coremltools as ct
        try:
            return ct.models.MLModel(str(path), skip_model_load=True)
        except Exception as error:             # coremltools raises exceptions of many kinds
            raise UserError(f'{path} cannot be read as a Core ML package: {one_line(error)}') from error


def _operations(model: Any) -> List[Any]:
    """Return the operations of the main function, as in the file."""
    function = model.get_spec().mlProgram.functions['main']
    return list(function.block_specializations[function.opset].operations)


def _check_flexible(path: Path, operations: List[Any], description: Any) -> None:
    """Refuse a program that only pretends to take any batch.

    Its converter may write the batch of the example into a reshape; then the target is constant without a -1."""
    constants = {operation.outputs[0].name: list(operation.attributes['val'].immediateValue.tensor.ints.values)
                 for operation in operations if operation.type == 'const'}
    types = {output.name: output.type.tensorType for operation in operations for output in operation.outputs}
    for operation in operations:
        if operation.type == 'reshape':
            source, target = (operation.inputs[name].arguments[0].name for name in ('x', 'shape'))
            if source in types and _is_open(types[source]) and target in constants and -1 not in constants[target]:
                raise UserError(f'the batch cannot be dynamic: {path} would hold a reshape to the constant shape '
                                f'{constants[target]}')
    fixed = [output.name for output in description.output if not _is_open(types[output.name])]
    if fixed:
        raise UserError(f'the batch cannot be dynamic: the output {fixed[0]} of {path} would have a constant shape')


def _is_open(kind: Any) -> bool:
    """Whether a tensor's type leaves a dimension open."""
    return any(dimension.HasField('unknown') for dimension in kind.dimensions)


def _norm_of_one_group(x: Tensor, groups: int, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None,
                       eps: float = 1e-5, _: bool = True) -> Tensor:
    """Compute `torch.group_norm` for one group, with the batch as the only open dimension of reshapes."""
    if groups != 1:
        return NotImplemented
    flat = x.reshape(-1, math.prod(x.shape[1:]))
    centered = flat - flat.mean(1, keepdim=True)
    flat = centered / (centered.square().mean(1, keepdim=True) + eps).sqrt()
    y = flat.reshape(-1, *x.shape[1:])
    shape = (1, -1, *[1] * (x.ndim - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _takes_half(operation: Any) -> bool:
    """Whether an operation may be computed in half precision.

    Cumulative sums and their differences may not: the logarithm of a decay would lose its last digits."""
    if operation.op_type == 'sub':
        return not any(_is_cumulative(operation.inputs[name]) for name in ('x', 'y'))
    return operation.op_type != 'cumsum'


def _is_cumulative(value: Any) -> bool:
    """Whether a value is a cumulative sum, perhaps moved or cast."""
    while value.op is not None and value.op.op_type in ('expand_dims', 'transpose', 'reshape', 'cast', 'reverse'):
        value = value.op.x
    return value.op is not None and value.op.op_type == 'cumsum'
