"""Core ML: packages reload with known operators, and a dynamic batch is kept or refused. Nothing runs here.

tests/exporters/test_coreml_on_mac.py runs packages.
"""
import json

import pytest
import torch
from export_cases import LABELS, small_classifier, subject_of

from subquad.tools.common.cli import UserError
from subquad.tools.exporters import to_coreml
from subquad.tools.exporters.formats import Options
from subquad.tools.exporters.pipeline import export
from subquad.tools.exporters.subject import with_normalization

pytest.importorskip('coremltools')
optimize = pytest.importorskip('coremltools.optimize.coreml')
BATCH = frozenset(['batch'])
FLOAT, HALF = 65568, 10          # float32 of inputs and outputs and float16 of operators in the files


def written(folder, subject, precision='fp32', dynamic=frozenset()):
    """Export a subject: (description, operations without constants, values of constants by name, metadata)."""
    path = export(subject, 'coreml', folder / 'small.mlpackage', Options(precision, dynamic)).path
    operations = to_coreml._operations(to_coreml._reload(path))
    values = {operation.outputs[0].name: list(operation.attributes['val'].immediateValue.tensor.floats.values)
              for operation in operations if operation.type == 'const'}
    return (to_coreml._reload(path).get_spec().description, [op for op in operations if op.type != 'const'], values,
            to_coreml.read_metadata(path))


def exported(folder, name, precision='fp32', dynamic=frozenset(), **options):
    return export(subject_of(name, **options), 'coreml', folder / f'{name}.mlpackage', Options(precision, dynamic))


@pytest.mark.parametrize('name, options', [
    ('test_mobilevitv2', dict(dynamic=BATCH)),
    pytest.param('test_mobilevitv2', dict(size=(64, 96), features=True), marks=pytest.mark.slow),
])
def test_networks_convert_and_reload(name, options, tmp_path):
    report = exported(tmp_path, name, **options)
    assert report.passed and report.errors is None and [file.name for file in tmp_path.iterdir()] == [report.path.name]
    assert any('was not run' in note for note in report.notes)
    metadata = to_coreml.read_metadata(report.path)
    assert metadata['model'] == name and metadata['input']['dynamic'] == sorted(options.get('dynamic', ()))
    # Core ML's reciprocal adds 1e-4 to its argument, and coremltools sets no other number.
    assert 'inverse' not in report.conversion.operators and report.conversion.operators['conv'] > 5
    description = to_coreml._reload(report.path).get_spec().description
    assert [output.name for output in description.output] == [output['name'] for output in metadata['outputs']]
    assert description.input[0].name == 'image'
    assert description.input[0].type.WhichOneof('Type') == (
        'multiArrayType' if options.get('dynamic') else 'imageType')


@pytest.mark.parametrize('color, space, mean, std', [
    ('RGB', 'RGB', (0.5, 0.25, 0.125), (0.5, 0.25, 0.2)), ('BGR', 'BGR', (0.5, 0.25, 0.125), (0.5, 0.25, 0.2)),
    ('RGB', 'RGB', (0.5, 0.25, 0.125), (0.25, 0.25, 0.25)), ('gray', 'GRAYSCALE', (0.5,), (0.25,))])
def test_images_are_normalized(color, space, mean, std, tmp_path):
    description, operations, values, metadata = written(tmp_path, small_classifier(color, mean, std))
    taken = description.input[0].type.imageType
    assert (taken.height, taken.width, type(taken).ColorSpace.Name(taken.colorSpace)) == (16, 24, space)
    assert metadata['input']['range'] == [0, 255] and metadata['preprocessing']['normalize_in_graph']
    assert (metadata['input']['color'], metadata['preprocessing']['mean']) == (color, list(mean))
    steps = operations[:[op.type for op in operations].index('conv')]
    assert [op.type for op in steps] == ['mul', 'add', 'mul'][:3 if len(set(std)) > 1 else 2]
    pixels = expected = torch.tensor([0., 10., 255.]).view(-1, 1)
    for op in steps:
        constant = torch.tensor(values[op.inputs['y'].arguments[0].name])
        pixels = pixels * constant if op.type == 'mul' else pixels + constant
    torch.testing.assert_close(pixels, (expected / 255 - torch.tensor(mean)) / torch.tensor(std))


def test_a_graph_that_normalizes_takes_an_image_as_it_is(tmp_path):
    _, operations, _, metadata = written(tmp_path, with_normalization(small_classifier()))
    assert not [op for op in operations if op.outputs[0].name.startswith('image__')]      # no scale and no bias
    assert metadata['input']['range'] == [0, 255]


@pytest.mark.parametrize('labels, dynamic, outputs', [
    (LABELS, frozenset(), ['label', 'label_probs']), ([], frozenset(), ['logits']), (LABELS, BATCH, ['logits']),
    (['cat', 'dog', 'dog'], frozenset(), ['logits'])])
def test_classifiers_with_labels(labels, dynamic, outputs, tmp_path):
    description, operations, _, metadata = written(tmp_path, small_classifier(labels=labels), 'fp16', dynamic)
    assert [output.name for output in description.output] == outputs
    assert [output['name'] for output in metadata['outputs']] == outputs
    classifies = outputs != ['logits']
    assert description.predictedFeatureName == ('label' if classifies else '')
    assert description.predictedProbabilitiesName == ('label_probs' if classifies else '')
    assert metadata['labels'] == labels
    if classifies:
        assert [output['shape'] for output in metadata['outputs']] == [[], [3]]
        assert [op.type for op in operations[-3:]] == ['softmax', 'cast', 'classify']
        names = operations[-1].inputs['classes'].arguments[0].value.immediateValue.list.values
        assert [name.immediateValue.tensor.strings.values[0] for name in names] == labels
    else:
        assert metadata['outputs'] == [dict(name='logits', shape=[1, 3], dtype='float32')]
        assert operations[-1].type != 'softmax'


@pytest.mark.parametrize('precision, operator, bits, error', [
    ('int8', 'constexpr_affine_dequantize', 8, 0.01), ('palette6', 'constexpr_lut_to_dense', 6, 0.03),
    ('palette4', 'constexpr_lut_to_dense', 4, 0.12)])
def test_compressed_weights(precision, operator, bits, error, tmp_path):
    """The large weight has fewer bits, the others and the arithmetic have 16; image and labels are kept."""
    plain, path = tmp_path / 'plain', tmp_path / precision
    written(plain, small_classifier(), 'fp16')
    description, operations, _, metadata = written(path, small_classifier(), precision)
    assert [op.type for op in operations].count(operator) == 1 and metadata['precision'] == precision
    assert description.input[0].type.WhichOneof('Type') == 'imageType' and description.predictedFeatureName == 'label'
    assert {op.outputs[0].type.tensorType.dataType for op in operations if op.type == 'conv'} == {HALF}
    size = {folder: (folder / 'small.mlpackage/Data/com.apple.CoreML/weights/weight.bin').stat().st_size
            for folder in (plain, path)}
    saved = 64 * 64 * 9 * (16 - bits) / 8
    assert 0.95 * saved < size[plain] - size[path] <= saved
    original = small_classifier().module.conv.weight.detach()
    weight, = [entry.val for entry in optimize.get_weights_metadata(
        optimize.decompress_weights(to_coreml._reload(path / 'small.mlpackage'))).values()]
    assert 0.1 * error < (torch.from_numpy(weight).float() - original).norm() / original.norm() < error
    assert precision == 'int8' or len(set(weight.ravel().tolist())) == 2 ** bits


@pytest.mark.slow
def test_fp16_keeps_cumulative_sums_in_float32(tmp_path):
    path = exported(tmp_path, 'test_ppma', 'fp16').path
    types = {}
    for operation in to_coreml._operations(to_coreml._reload(path)):
        types.setdefault(operation.type, set()).add(operation.outputs[0].type.tensorType.dataType)
    assert len(types['cumsum']) == len(types['conv']) == 1 and types['cumsum'] != types['conv']
    assert types['sub'] == types['cumsum'] and types['softmax'] == types['conv']
    description = to_coreml._reload(path).get_spec().description
    assert description.output[0].type.multiArrayType.dataType == FLOAT


@pytest.mark.slow
def test_constant_reshapes_are_no_dynamic_batch(tmp_path):
    path = exported(tmp_path, 'test_mobilevitv2').path
    model = to_coreml._reload(path)
    metadata = to_coreml.read_metadata(path)
    metadata['input']['dynamic'] = ['batch']
    model.user_defined_metadata['subquad'] = json.dumps(metadata)
    model.save(str(tmp_path / 'b.mlpackage'))
    with pytest.raises(UserError, match=r'batch cannot be dynamic: .* constant shape'):
        to_coreml.check(tmp_path / 'b.mlpackage')


def test_broken_packages(tmp_path):
    (tmp_path / 'a.mlpackage').mkdir()
    for read in (to_coreml.check, to_coreml.read_metadata):
        for path in (tmp_path / 'a.mlpackage', tmp_path / 'missing.mlpackage'):
            with pytest.raises(UserError, match='cannot be read as a Core ML package'):
                read(path)


@pytest.mark.slow
@pytest.mark.parametrize('precision, dynamic', [('fp32', frozenset()), ('fp16', frozenset()), ('fp32', BATCH)])
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('name', ['ppma_tiny', 'myo_tiny', 'subquad_mobilevitv2_050', 'test_ppma', 'test_myo',
                                  'test_mobilevitv2'])
def test_every_family(name, features, precision, dynamic, tmp_path):
    assert exported(tmp_path, name, precision, dynamic, features=features).passed
