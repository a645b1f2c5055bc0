"""ONNX files hold only what the parser of TensorRT 10 reads by its documentation. TensorRT itself is not run."""
import numpy as np
import pytest
from digits_exports import calibration_of, digits_subject
from pairwise import slow

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')
pytest.importorskip('onnxscript')

from families import FAMILIES  # noqa: E402
from onnx import TensorProto  # noqa: E402
from onnx_exports import record_once, subject  # noqa: E402

from subquad.tools.exporters import onnx_graph, to_onnx  # noqa: E402
from subquad.tools.exporters.formats import Options  # noqa: E402

# Operators with "Y" in docs/operators.md of github.com/onnx/onnx-tensorrt for TensorRT 10.15 (opset 9 to 24).
SUPPORTED = set('''
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BlackmanWindow Cast
CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DeformConv DepthToSpace
DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu
Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization GRU HammingWindow
HannWindow HardSigmoid HardSwish Hardmax Identity If ImageScaler InstanceNormalization IsInf IsNaN LayerNormalization
LeakyRelu Less LessOrEqual Log LogSoftmax Loop LRN LSTM LpNormalization LpPool MatMul Max MaxPool Mean
MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression NonZero Not OneHot Or Pad ParametricSoftplus Pow PRelu
QuantizeLinear RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2
ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize
ReverseSequence RMSNormalization RNN RoiAlign RotaryEmbedding Round STFT ScaledTanh Scan Scatter ScatterElements
ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze
Sub Sum Tan Tanh TensorScatter ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
'''.split())
TYPES = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL}
# Of these inputs, the document asks that they are constants.
CONSTANT = {'CumSum': 1, 'Squeeze': 1, 'Unsqueeze': 1, **{f'Reduce{kind}': 1 for kind in (
    'L1', 'L2', 'LogSum', 'LogSumExp', 'Max', 'Mean', 'Min', 'Prod', 'Sum', 'SumSquare')}}
LARGEST_K = 3839                # of TopK


def refused(model):
    """What the document does not allow in a model: operators, types, and restrictions of operators."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    types.update({value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)})
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    constants.update({node.output[0]: node.output[0] for node in graph.node if node.op_type == 'Constant'})
    found = {f'type {TensorProto.DataType.Name(kind)}' for kind in types.values() if kind not in TYPES}
    for node in graph.node:
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        place = CONSTANT.get(node.op_type, 0)
        if node.op_type not in SUPPORTED:
            found.add(node.op_type)
        if place and place < len(node.input) and node.input[place] not in constants:
            found.add(f'{node.op_type} with a computed argument')
        if node.op_type == 'Resize' and (attributes.get('mode', b'nearest') not in (b'nearest', b'linear')
                                         or attributes.get('antialias')):
            found.add('Resize that is cubic or antialiased')
        if node.op_type == 'LayerNormalization' and len(node.output) > 1:
            found.add('LayerNormalization with more outputs')
        if node.op_type == 'TopK' and node.input[1] in constants and constants[node.input[1]] > LARGEST_K:
            found.add('TopK with a large k')
    return found


@pytest.fixture(autouse=True)
def recorded_once(monkeypatch):
    record_once(monkeypatch)


@pytest.mark.parametrize('name', ['test_mobilevitv2', *slow(*sorted({*FAMILIES} - {'test_mobilevitv2'}))])
def test_every_family(name):
    for features in (False, True):
        for precision in ('fp32', 'fp16'):
            assert not refused(to_onnx.build(subject(name, features), Options(precision)))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['test_ppma', 'test_mobilevitv2', 'test_rmt', 'test_mlla'])
def test_dynamic_batch_height_and_width(name):
    assert not refused(to_onnx.build(subject(name), Options(dynamic=frozenset({'batch', 'hw'}))))


def test_the_selection_of_detections():
    shapes = dict(boxes=(1, 5, 4), scores=(1, 5, 3))
    values = {name: onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
              for name, shape in dict(image=(1, 3, 8, 8), **shapes).items()}
    nodes = [onnx.helper.make_node('RandomNormal', [], [name], shape=shape) for name, shape in shapes.items()]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, 'g', [values['image']],
                                                          [values['boxes'], values['scores']]),
                                   opset_imports=[onnx.helper.make_opsetid('', onnx_graph.OPSET)], ir_version=10)
    assert not refused(onnx_graph.append_nms(model, dict(score_threshold=0.1, iou_threshold=0.5,
                                                         candidates_per_class=4, max_detections=10)))


def test_quantized_files_are_not_for_tensorrt():
    """Their activations are uint8 with zero points; TensorRT takes int8 without."""
    made = digits_subject('test_ppma')
    model = to_onnx.build(made, Options('int8', calibration=calibration_of(made, 'int8')))
    assert refused(model) == {'type UINT8', 'type INT8'}


def test_the_check_can_fail():
    def model(*nodes):
        x, y = (onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 1, 4, 4)) for name in 'xy')
        k = onnx.numpy_helper.from_array(np.array([4000]), 'k')
        return onnx.helper.make_model(onnx.helper.make_graph(nodes, 'g', [x], [y], [k]))
    node = onnx.helper.make_node
    assert refused(model(node('Det', ['x'], ['y']))) == {'Det'}
    assert refused(model(node('TopK', ['x', 'k'], ['y', 'i']))) == {'TopK with a large k'}
    assert refused(model(node('Resize', ['x', '', '', 'k'], ['y'], mode='cubic'))) == {
        'Resize that is cubic or antialiased'}
    assert refused(model(node('Shape', ['x'], ['a']), node('Squeeze', ['x', 'a'], ['y']))) == {
        'Squeeze with a computed argument'}
