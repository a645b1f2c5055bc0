"""Recurrences of LCSM of each kind, in several formats: the files run within the tolerances."""
import pytest
from export_cases import small_lcsm

from subquad.tools.common.cli import UserError
from subquad.tools.exporters.formats import FORMATS, Options, missing_packages
from subquad.tools.exporters.graph import export_program
from subquad.tools.exporters.pipeline import export

# Gates of the token, constant decays, decays of full rank, and delta rules.
# tests/exporters/test_to_onnx.py exports a block with the default mixer.
CASES = [('ncnn', 'gla'), ('onnx', '1-6-1-0'), ('onnx', '1-4-1-0'), ('onnx', 'deltanet'), ('ncnn', '1-4-1-0'),
         ('ncnn', '1-6-1-0'), ('ncnn', 'deltanet'), ('coreml', 'gla')]


@pytest.mark.slow
@pytest.mark.parametrize('name, mixer', CASES)
def test_recurrences_run_as_the_ordinary_model(name, mixer, tmp_path):
    if missing_packages(name):
        pytest.skip(f'{name} is not installed')
    report = export(small_lcsm(mixer), name, tmp_path / f'model{FORMATS[name].suffix}', Options(), repeats=0)
    assert report.passed and report.path.exists()
    if report.errors is not None:
        assert report.errors.relative < 1e-5
    assert not [operator for operator in report.conversion.operators if 'subquad' in operator]


@pytest.mark.slow
@pytest.mark.parametrize('mixer', ['s4d', 's5'])
def test_complex_states_are_refused(mixer):
    with pytest.raises(UserError, match='other runtimes cannot run: .* on complex numbers') as error:
        export_program(small_lcsm(mixer))
    assert '\n' not in str(error.value)
