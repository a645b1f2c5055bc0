"""Core ML: packages reload with known operators, and a dynamic batch is kept or refused. Nothing runs here."""
import json

import pytest
from export_cases import subject_of

from subquad.tools.common.cli import UserError
from subquad.tools.exporters import to_coreml
from subquad.tools.exporters.formats import Options
from subquad.tools.exporters.pipeline import export

pytest.importorskip('coremltools')
BATCH = frozenset(['batch'])
FLOAT = 65568                    # float32 in the files


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


@pytest.mark.slow
def test_fp16_keeps_cumulative_sums_in_float32(tmp_path):
    path = exported(tmp_path, 'test_ppma', 'fp16').path
    types = {}
    for operation in to_coreml._operations(to_coreml._reload(path)):
        types.setdefault(operation.type, set()).add(operation.outputs[0].type.tensorType.dataType)
    assert len(types['cumsum']) == len(types['conv']) == 1 and types['cumsum'] != types['conv']
    assert types['sub'] == types['cumsum'] and types['softmax'] == types['conv']
    description = to_coreml._reload(path).get_spec().description
    assert {tensor.type.multiArrayType.dataType for tensor in [*description.input, *description.output]} == {FLOAT}


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
