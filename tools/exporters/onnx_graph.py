"""ONNX graphs: how PyTorch writes operators, the removal of reshapes, the check for what runtimes refuse, and NMS."""
from collections import Counter
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import numpy as np
import onnx
import onnx_ir
import torch
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass
from onnxscript import FLOAT
from onnxscript import opset20 as op

from ..common.cli import UserError
from .graph import LARGEST_RANK

# The oldest version with Gelu. Newer ones bring nothing that these models need, and older runtimes refuse them.
OPSET = 20
_CONTROL_FLOW = ('Loop', 'Scan', 'If', 'SequenceMap')


def _softplus(x: FLOAT, beta: float = 1.0, threshold: float = 20.0) -> FLOAT:
    """Write softplus as one operator: that of ONNX does not overflow, so the threshold has no use."""
    return op.Softplus(x) if beta == 1 else op.Div(op.Softplus(op.Mul(x, beta)), beta)


def _group_norm(
        x: FLOAT,
        num_groups: int,
        weight: Optional[FLOAT] = None,
        bias: Optional[FLOAT] = None,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
) -> FLOAT:
    """Write GroupNorm as InstanceNormalization of rows (B, groups, N), for which ONNX Runtime has a CPU kernel.

    It has none for GroupNormalization, which it would replace by 14 operators.
    """
    one, zero = (op.Constant(value_floats=[value] * num_groups) for value in (1.0, 0.0))
    if len(x.shape) == 3 and x.shape[1] == num_groups:
        y = op.InstanceNormalization(x, one, zero, epsilon=eps)
    else:
        rows = op.Reshape(x, op.Constant(value_ints=[0, num_groups, -1]))
        y = op.Reshape(op.InstanceNormalization(rows, one, zero, epsilon=eps), op.Shape(x))
    axes = op.Constant(value_ints=list(range(1, len(x.shape) - 1)))
    y = y if weight is None else op.Mul(y, op.Unsqueeze(weight, axes))
    return y if bias is None else op.Add(y, op.Unsqueeze(bias, axes))


def translations() -> Dict[Callable, Callable]:
    """Return the functions that write an operator of PyTorch otherwise than its exporter does."""
    return {torch.ops.aten.softplus.default: _softplus, torch.ops.aten.group_norm.default: _group_norm}


def merge_reshapes(model: ModelProto) -> None:
    """Remove reshapes of a tensor that only another reshape takes, in place.

    The operators split tokens into a grid of rank 5 and merge the grid again; this leaves tensors of rank 4.
    """
    graph = model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer
                 if tensor.data_type == TensorProto.INT64}
    producers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type != 'Reshape' or not _names_all_sizes(node, producers, constants):
            continue
        before = producers.get(node.input[0])
        while before is not None and before.op_type in ('Reshape', 'Unsqueeze', 'Squeeze', 'Flatten'):
            node.input[0] = before.input[0]
            before = producers.get(node.input[0])
    remove_unused(model)


def _names_all_sizes(node: NodeProto, producers: Dict[str, NodeProto], constants: Dict[str, object]) -> bool:
    """False if a size may be 0, which stands for the size of the input."""
    shape = node.input[1]
    if shape in constants:
        return 0 not in constants[shape]
    made = producers.get(shape)
    if made is None or made.op_type not in ('Concat', 'Shape'):
        return False
    return made.op_type == 'Shape' or not any(0 in constants[name] for name in made.input if name in constants)


def remove_unused(model: ModelProto) -> None:
    """Remove nodes, constants and versions of operator sets that no output depends on, in place."""
    kept = onnx_ir.from_proto(model)
    RemoveUnusedNodesPass()(kept)
    RemoveUnusedOpsetsPass()(kept)
    model.CopyFrom(onnx_ir.to_proto(kept))


def strip(model: ModelProto) -> None:
    """Remove what the exporter notes beside the graph, among it lines of the source and paths of this computer."""
    graph = model.graph
    del graph.value_info[:], model.metadata_props[:]
    for item in (*graph.node, *graph.initializer, *graph.input, *graph.output, graph):
        del item.metadata_props[:]
        item.doc_string = ''
    model.doc_string = ''


def name_dimensions(model: ModelProto, names: Dict[int, str]) -> None:
    """Name the open dimensions of the one input by its axes, and those of the outputs after them, such as 'height/4'.
    """
    symbols = {}                                   # symbol -> (name, multiple of the symbol)
    for axis, dim in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
        if dim.dim_param:
            factor, _, symbol = dim.dim_param.rpartition('*')
            symbols[symbol] = (names[axis], int(factor or 1))
            dim.dim_param = names[axis]
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if not dim.dim_param:
                continue
            factor, _, symbol = dim.dim_param.rpartition('*')
            name, multiple = symbols.get(symbol, ('', 0))
            if not name or factor and not factor.isdigit() or multiple % int(factor or 1):
                dim.ClearField('dim_param')        # the runtime does not need it
                continue
            stride = multiple // int(factor or 1)
            dim.dim_param = name if stride == 1 else f'{name}/{stride}'


def refuse_other_sizes(model: ModelProto, multiple: int) -> None:
    """Make the runtime fail for a height or width that is no multiple of `multiple`, in place.

    The image is reshaped to the multiples below its height and width, which fails unless they are equal. Without this,
    a later reshape could take pixels of one image for those of another.
    """
    graph, image, given = model.graph, model.graph.input[0].name, 'accepted_image'
    for node in graph.node:
        node.input[:] = [given if name == image else name for name in node.input]
    graph.initializer.append(numpy_helper.from_array(np.array([1, 1, multiple, multiple]), 'multiples'))
    name = f'height_and_width_must_be_multiples_of_{multiple}'
    added = [onnx.helper.make_node('Shape', [image], ['image_shape'], name='image_shape'),
             onnx.helper.make_node('Div', ['image_shape', 'multiples'], ['image_steps'], name='image_steps'),
             onnx.helper.make_node('Mul', ['image_steps', 'multiples'], ['accepted_shape'], name='accepted_shape'),
             onnx.helper.make_node('Reshape', [image, 'accepted_shape'], [given], name=name, allowzero=1)]
    nodes = [*added, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def check_graph(model: ModelProto) -> None:
    """Refuse what a runtime may not have."""
    bad = [f'{node.domain}.{node.op_type}' for node in model.graph.node if node.domain not in ('', 'ai.onnx')]
    bad += [f'function {function.name}' for function in model.functions]
    bad += [node.op_type for node in model.graph.node if node.op_type in _CONTROL_FLOW]
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    ranks = {value.name: len(value.type.tensor_type.shape.dim)
             for value in (*graph.input, *graph.value_info, *graph.output) if value.type.tensor_type.HasField('shape')}
    ranks.update({tensor.name: len(tensor.dims) for tensor in graph.initializer})
    for node in model.graph.node:
        for name in node.output:
            if name and ranks.get(name, LARGEST_RANK + 1) > LARGEST_RANK:
                bad.append(f'{node.op_type} with {ranks.get(name, "an unknown number of")} dimensions')
    if bad:
        raise UserError('the ONNX graph holds what other runtimes cannot run: ' + ', '.join(dict.fromkeys(bad)))


def count_operators(names: Iterable[str]) -> Dict[str, int]:
    """Return the number of operators by name, the most frequent first. Constants are not counted."""
    return dict(Counter(name for name in names if name != 'Constant').most_common())


# ---- selection of detections

# NonMaxSuppression does not limit the candidates of a class. So all other scores are set to the threshold, which it
# excludes.
_NMS = '''
<ir_version: 8, opset_import: ["" : {opset}]>
select (float[1, {anchors}, 4] raw_boxes, float[1, {anchors}, {classes}] raw_scores)
    => (float[detections, 4] boxes, float[detections] scores, int64[detections] labels)
<float[1] threshold = {{{score_threshold}}}, float[1] overlap = {{{iou_threshold}}}, float[1] least = {{0}},
 float[4] corner = {{{width}, {height}, {width}, {height}}}, int64[1] candidates = {{{candidates}}},
 int64[1] most = {{{most}}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] three = {{3}},
 int64[1] last = {{{last}}}>
{{
    by_class = Transpose <perm = [0, 2, 1]> (raw_scores)
    best, best_index = TopK <axis = 2> (by_class, candidates)
    worst = Gather <axis = 2> (best, last)
    is_candidate = GreaterOrEqual (by_class, worst)
    limited = Where (is_candidate, by_class, threshold)
    found = NonMaxSuppression (raw_boxes, limited, candidates, overlap, threshold)
    class_and_box = Slice (found, one, three, one)
    plain_scores = Squeeze (raw_scores, zero)
    box_index = Slice (found, two, three, one)
    class_index = Slice (found, one, two, one)
    box_and_class = Concat <axis = 1> (box_index, class_index)
    found_scores = GatherND (plain_scores, box_and_class)
    count = Shape (found_scores)
    kept = Min (count, most)
    scores, order = TopK <axis = 0> (found_scores, kept)
    flat_classes = Squeeze (class_index, one)
    labels = Gather <axis = 0> (flat_classes, order)
    flat_boxes = Squeeze (box_index, one)
    kept_boxes = Gather <axis = 0> (flat_boxes, order)
    plain_boxes = Squeeze (raw_boxes, zero)
    unclipped = Gather <axis = 0> (plain_boxes, kept_boxes)
    positive = Max (unclipped, least)
    boxes = Min (positive, corner)
}}
'''


def append_nms(model: ModelProto, settings: Dict[str, Any]) -> ModelProto:
    """Append the selection of detections to an ONNX model with the outputs boxes and scores.

    Args:
        model: Model with one input image (1, C, H, W) and the float32 outputs boxes (1, N, 4) and
            scores (1, N, classes), with opset 13 or later. It is not changed.
        settings: The `postprocessing` of the metadata. For each class, the `candidates_per_class`
            best boxes remain whose scores are above `score_threshold`. Of two boxes of a class
            whose intersection over union is above `iou_threshold`, the worse is left out. The
            `max_detections` best boxes of all classes are returned.

    Returns:
        A model with the outputs boxes (n, 4), clipped to the image, scores (n,), and labels (n,),
        int64, in descending order of scores, and the inputs of the selection as raw_boxes and
        raw_scores.
    """
    opset = next(entry.version for entry in model.opset_import if entry.domain in ('', 'ai.onnx'))
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    _rename(graph, {name: f'raw_{name}' for name in ('boxes', 'scores')})
    height, width = _shape(graph.input[0])[-2:]
    anchors, classes = _shape(graph.output[1])[-2:]
    candidates = min(settings['candidates_per_class'], anchors)
    text = _NMS.format(opset=opset, anchors=anchors, classes=classes, height=float(height),
                       width=float(width), score_threshold=float(settings['score_threshold']),
                       iou_threshold=float(settings['iou_threshold']), last=candidates - 1,
                       candidates=candidates, most=settings['max_detections'])
    selection = onnx.compose.add_prefix(onnx.parser.parse_model(text), 'nms/', rename_inputs=False,
                                        rename_outputs=False).graph
    graph.node.extend(selection.node)
    graph.initializer.extend(selection.initializer)
    outputs = [*selection.output, *graph.output]
    del graph.output[:]
    graph.output.extend(outputs)
    onnx.checker.check_model(result)
    return result


def _rename(graph: Any, names: Dict[str, str]) -> None:
    """Rename values of an ONNX graph without subgraphs, in place."""
    for node in graph.node:
        for values in (node.input, node.output):
            for n, name in enumerate(values):
                values[n] = names.get(name, name)
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)


def _shape(value: Any) -> Tuple[int, ...]:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
