"""Select detections from raw boxes and scores as nodes of an ONNX graph."""
from typing import TYPE_CHECKING, Any, Dict, Tuple

if TYPE_CHECKING:
    from onnx import ModelProto

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


def append_nms(model: 'ModelProto', settings: Dict[str, Any]) -> 'ModelProto':
    """Append the selection of detections to an ONNX model with the outputs boxes and scores.

    Args:
        model: Model with one input image (1, C, H, W) and the float32 outputs boxes (1, N, 4) and scores
            (1, N, classes), with opset 13 or later. It is not changed.
        settings: The `postprocessing` of the metadata. For each class, the `candidates_per_class` best boxes remain
            whose scores are above `score_threshold`. Of two boxes of a class whose intersection over union is above
            `iou_threshold`, the worse is left out. The `max_detections` best boxes of all classes are returned.

    Returns:
        A model with the outputs boxes (n, 4), clipped to the image, scores (n,), and labels (n,), int64, in descending
        order of scores, and the inputs of the selection as raw_boxes and raw_scores.
    """
    import onnx
    opset = next(entry.version for entry in model.opset_import if entry.domain in ('', 'ai.onnx'))
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    _rename(graph, {name: f'raw_{name}' for name in ('boxes', 'scores')})
    height, width = _shape(graph.input[0])[-2:]
    anchors, classes = _shape(graph.output[1])[-2:]
    candidates = min(settings['candidates_per_class'], anchors)
    text = _NMS.format(opset=opset, anchors=anchors, classes=classes, height=float(height), width=float(width),
                       score_threshold=float(settings['score_threshold']), last=candidates - 1, candidates=candidates,
                       iou_threshold=float(settings['iou_threshold']), most=settings['max_detections'])
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
