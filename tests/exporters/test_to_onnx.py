"""The format ONNX, run on ONNX Runtime."""
import json
import math

import numpy as np
import pytest
import torch
from digits_exports import check_accuracy, digits_subject
from helpers import assert_close, relative_error
from pairwise import slow
from torch import nn

onnx = pytest.importorskip('onnx')
onnxruntime = pytest.importorskip('onnxruntime')
pytest.importorskip('onnxscript')

from families import FAMILIES  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx_exports import MODELS, TEST_MODELS, check_outputs, record_once, subject  # noqa: E402

from subquad.tools.common.cli import UserError  # noqa: E402
from subquad.tools.exporters import onnx_graph, to_onnx  # noqa: E402
from subquad.tools.exporters.formats import Options  # noqa: E402
from subquad.tools.exporters.graph import silence  # noqa: E402
from subquad.tools.exporters.subject import classifier_subject, random_classifier  # noqa: E402

LARGE_MODELS = (*(f'subquad_mobilevitv2_{width}' for width in ('075', '100', '125', '150', '175', '200')),
                'ppma_small', 'ppma_base', 'rmt_tiny', 'mambavision_tiny', 'ppma_tiny_crisscross',
                'myo_small', 'myo_base')


@pytest.fixture(autouse=True)
def recorded_once(monkeypatch):
    record_once(monkeypatch)


def check_file(path):
    """Assert on the file: standard operators, ranks, no control flow, and nothing beside it."""
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    model = onnx.load(path)
    assert {entry.domain for entry in model.opset_import} == {''} == {node.domain for node in model.graph.node}
    assert [entry.version for entry in model.opset_import] == [20] and not model.functions
    kinds = {node.op_type for node in model.graph.node}
    assert not kinds & {'Loop', 'Scan', 'If', 'GroupNormalization', 'Where'}
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*inferred.value_info, *inferred.output)}
    assert max(ranks[name] for node in model.graph.node for name in node.output) <= 4
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
    return model


def convert_and_check(name, features, options, folder, shapes=((1, None), (1, None))):
    made, path = subject(name, features), folder / 'model.onnx'
    to_onnx.convert(made, options, path)
    check_outputs(to_onnx, path, made, options, shapes)
    check_file(path)


@pytest.mark.parametrize('name', [*TEST_MODELS[:2], *slow(*TEST_MODELS[2:])])
def test_a_classifier_with_a_fixed_size(name, tmp_path, capfd):
    made, path = digits_subject(name), tmp_path / 'model.onnx'
    capfd.readouterr()
    conversion = to_onnx.convert(made, Options(), path)
    printed = capfd.readouterr()
    assert printed.out == printed.err == ''
    check_outputs(to_onnx, path, made)
    check_accuracy(to_onnx.load(path), made)
    model = check_file(path)
    assert conversion.operators['LayerNormalization' if name != 'test_mobilevitv2' else 'InstanceNormalization'] >= 10
    assert sum(conversion.operators.values()) == len(model.graph.node)
    weights = sum(math.prod(tensor.dims) for tensor in model.graph.initializer)
    parameters = sum(p.numel() for p in made.eager.parameters())
    assert 0.85 * parameters < weights < 1.3 * parameters          # MobileViTv2's linear maps in a row become one

    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    assert json.loads(session.get_modelmeta().custom_metadata_map['subquad']) == made.metadata
    assert to_onnx.read_metadata(path) == made.metadata
    assert [(x.name, x.shape) for x in session.get_inputs()] == [('image', [1, 3, *made.size])]
    assert [x.name for x in session.get_outputs()] == ['logits']
    for batch, (height, width) in ((2, made.size), (1, (made.size[0] + 32, made.size[1]))):
        with pytest.raises(Exception, match='Got invalid dimensions'):
            to_onnx.load(path)(made.example(batch, (height, width)))


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in FAMILIES if name not in TEST_MODELS])
def test_a_family_without_digits(name, tmp_path):
    convert_and_check(name, False, Options(), tmp_path)


@pytest.mark.slow
def test_a_recurrence_among_other_mixers(tmp_path):
    read = random_classifier('test_lcsm', mixers=(None, *['depthwise'] * 3), depths=(1, 1, 1, 1), num_classes=10)
    made, path = classifier_subject(read, 'hybrid'), tmp_path / 'model.onnx'
    to_onnx.convert(made, Options(), path)
    check_outputs(to_onnx, path, made)
    check_file(path)


def test_a_feature_pyramid_in_half_precision_with_a_dynamic_batch(tmp_path):
    made, path = subject('test_mobilevitv2', True), tmp_path / 'model.onnx'
    options = Options('fp16', frozenset({'batch'}))
    to_onnx.convert(made, options, path)
    check_outputs(to_onnx, path, made, options, [(1, None), (3, None)])
    model = check_file(path)
    assert {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} == {
        TensorProto.FLOAT}
    stored = {tensor.data_type: 0 for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        stored[tensor.data_type] += math.prod(tensor.dims)
    assert stored[TensorProto.FLOAT16] > 20 * stored.get(TensorProto.FLOAT, 0)
    dims = [[d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
            for value in (*model.graph.input, *model.graph.output)]
    assert dims[0] == ['batch', 3, 64, 64] and all(shape[0] == 'batch' for shape in dims)
    assert [value.name for value in model.graph.output] == ['stride_2', 'stride_4', 'stride_8', 'stride_16',
                                                            'stride_32']


@pytest.mark.parametrize('name, message', [('test_myo', 'quad tree for one image size'),
                                           ('test_lcsm', 'unrolls its recurrences for one image size')])
def test_dynamic_sizes_are_refused(name, message, tmp_path):
    with pytest.raises(UserError, match=message):
        to_onnx.convert(subject(name), Options(dynamic=frozenset({'hw'})), tmp_path / 'model.onnx')
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / 'model.onnx'
    path.write_bytes(b'no model')
    for read in (to_onnx.load, to_onnx.read_metadata):
        with pytest.raises(UserError, match='ONNX Runtime cannot read .*model.onnx'):
            read(path)
    onnx.save_model(graph_of(helper.make_node('Relu', ['x'], ['y'])), path)
    with pytest.raises(UserError, match='has no metadata of `subquad export`'):
        to_onnx.read_metadata(path)


@pytest.mark.slow
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('precision', ['fp32', 'fp16'])
@pytest.mark.parametrize('name', (*TEST_MODELS, *MODELS))
def test_classifiers_and_pyramids(name, precision, features, tmp_path):
    convert_and_check(name, features, Options(precision), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('name', LARGE_MODELS)
def test_larger_classifiers(name, tmp_path):
    convert_and_check(name, False, Options(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('name', ['test_myo', 'myo_tiny'])
def test_myo_with_a_dynamic_batch(name, features, tmp_path):
    convert_and_check(name, features, Options(dynamic=frozenset({'batch'})), tmp_path, [(1, None), (3, None)])


@pytest.mark.slow
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('name', ['test_ppma', 'ppma_tiny', 'test_mobilevitv2', 'subquad_mobilevitv2_050'])
def test_dynamic_batch_height_and_width(name, features, tmp_path):
    step = subject(name).sizes.multiple_of
    sizes = [(4 * step, 3 * step), (3 * step, 4 * step), (5 * step, 5 * step)]
    options = Options(dynamic=frozenset({'batch', 'hw'}))
    convert_and_check(name, features, options, tmp_path, [(n + 1, size) for n, size in enumerate(sizes)])
    check_other_sizes(subject(name, features), tmp_path / 'model.onnx', step)


def check_other_sizes(made, path, step):
    """A size that is no multiple of the step is an error, also where the numbers of pixels would fit by chance."""
    run = to_onnx.load(path)
    for size in ((4 * step + 1, 4 * step), (4 * step, 4 * step + step // 2), (step // 2, 4 * step)):
        for batch in (1, 4):
            with pytest.raises(Exception, match=f'must_be_multiples_of_{step}'):
                run(made.example(batch, size))


# --- the graph

def graph_of(*nodes, shape=(1, 6, 4, 8), constants=(), out_shape=None, opset=20):
    """An ONNX model from x to y."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
            for name, dims in (('x', shape), ('y', out_shape)))
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in dict(constants).items()]
    graph = helper.make_graph(nodes, 'graph', [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid('', opset), helper.make_opsetid('my', 1)],
                             ir_version=10)


def run_model(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=['CPUExecutionProvider'])
    return torch.from_numpy(session.run(None, {'x': x.numpy()})[0])


def test_reshapes_of_reshapes_are_merged():
    nodes = [helper.make_node('Reshape', ['x', 'five'], ['a']), helper.make_node('Reshape', ['a', 'flat'], ['b']),
             helper.make_node('Unsqueeze', ['b', 'axis'], ['c']), helper.make_node('Reshape', ['c', 'last'], ['d']),
             helper.make_node('Relu', ['d'], ['y'])]
    constants = dict(five=[1, 2, 3, 4, 8], flat=[2, -1], axis=[0], last=[3, -1])
    model = graph_of(*nodes, constants=constants)
    x = torch.randn(1, 6, 4, 8)
    before = run_model(model, x)
    onnx_graph.merge_reshapes(model)
    assert [(node.op_type, list(node.input)) for node in model.graph.node] == [
        ('Reshape', ['x', 'last']), ('Relu', ['d'])]
    assert [tensor.name for tensor in model.graph.initializer] == ['last']
    assert [entry.domain for entry in model.opset_import] == ['']
    assert torch.equal(run_model(model, x), before) and before.shape == (3, 64)


def test_a_reshape_that_copies_a_size_is_kept():
    nodes = [helper.make_node('Reshape', ['x', 'flat'], ['a']), helper.make_node('Reshape', ['a', 'copy'], ['y'])]
    model = graph_of(*nodes, constants=dict(flat=[2, -1], copy=[0, 8, -1]))
    onnx_graph.merge_reshapes(model)
    assert len(model.graph.node) == 2


@pytest.mark.parametrize('node, constants, message', [
    (helper.make_node('Magic', ['x'], ['y'], domain='my'), {}, 'my.Magic'),
    (helper.make_node('Reshape', ['x', 's'], ['y']), {'s': [1, 2, 3, 4, 8]}, 'Reshape with 5 dimensions'),
])
def test_the_check_refuses(node, constants, message):
    with pytest.raises(UserError, match=message):
        onnx_graph.check_graph(graph_of(node, constants=constants))


def test_the_check_refuses_control_flow():
    body = helper.make_graph(
        [helper.make_node('Relu', ['s'], ['t']), helper.make_node('Identity', ['c'], ['d'])], 'body',
        [helper.make_tensor_value_info('n', TensorProto.INT64, []),
         helper.make_tensor_value_info('c', TensorProto.BOOL, []),
         helper.make_tensor_value_info('s', TensorProto.FLOAT, (1, 6, 4, 8))],
        [helper.make_tensor_value_info('d', TensorProto.BOOL, []),
         helper.make_tensor_value_info('t', TensorProto.FLOAT, (1, 6, 4, 8))])
    node = helper.make_node('Loop', ['count', '', 'x'], ['y'], body=body)
    with pytest.raises(UserError, match='cannot run: Loop'):
        onnx_graph.check_graph(graph_of(node, constants=dict(count=3)))


def test_other_sizes_are_refused_by_the_runtime():
    model = graph_of(helper.make_node('Relu', ['x'], ['y']), shape=('n', 1, 'h', 'w'))
    onnx_graph.refuse_other_sizes(model, 4)
    x = torch.randn(2, 1, 8, 12)
    assert torch.equal(run_model(model, x), x.relu())
    for shape in ((1, 1, 7, 4), (3, 1, 8, 5), (4, 1, 2, 4)):
        with pytest.raises(Exception, match='multiples_of_4'):
            run_model(model, torch.randn(shape))


class _Norms(nn.Module):
    """GroupNorm with several groups, with and without weights, and softplus with a slope."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.GroupNorm(3, 6), nn.GroupNorm(1, 1, eps=1e-3, affine=False)
        nn.init.uniform_(self.first.weight, 0.5, 1.5)
        nn.init.normal_(self.first.bias)

    def forward(self, x):
        y = self.second(self.first(x).reshape(2, 1, -1)).reshape(x.shape)
        return nn.functional.softplus(30 * y) + nn.functional.softplus(y, beta=2.0)


def test_translations_of_norms_and_softplus():
    module, x = _Norms().eval(), 3 * torch.randn(2, 6, 4, 8) + 5
    with silence():
        program = torch.onnx.export(torch.export.export(module, (x,)), dynamo=True, opset_version=onnx_graph.OPSET,
                                    input_names=['x'], custom_translation_table=onnx_graph.translations(),
                                    verbose=False)
    kinds = onnx_graph.count_operators([node.op_type for node in program.model_proto.graph.node])
    assert kinds['InstanceNormalization'] == kinds['Softplus'] == 2 and 'Where' not in kinds
    assert_close(run_model(program.model_proto, x), module(x), 1e-6)
    assert relative_error(module(x), module(x + torch.randn_like(x))) > 1e-2      # the comparison can fail
