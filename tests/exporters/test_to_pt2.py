"""Archives of PyTorch: graphs of torch.export, and machine code of AOTInductor."""
import json
import zipfile

import pytest
import torch
from digits_exports import check_accuracy, digits_subject
from export_cases import small_classifier, subject_of
from families import FAMILIES
from onnx_exports import check_outputs

from subquad.tools import export as command
from subquad.tools.common.cli import UserError
from subquad.tools.exporters import formats, to_pt2
from subquad.tools.exporters.formats import FORMATS, Options
from subquad.tools.exporters.pipeline import export


def has_compiler():
    try:
        formats.exporter('aoti')
    except UserError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason='no C++ compiler')
aoti = pytest.param('aoti', marks=needs_compiler)


@pytest.mark.parametrize('name', ['pt2', pytest.param('aoti', marks=[needs_compiler, pytest.mark.slow])])
def test_a_classifier_with_a_dynamic_batch(name, tmp_path, capfd):
    made, path = digits_subject('test_ppma'), tmp_path / f'a{FORMATS[name].suffix}'
    capfd.readouterr()
    conversion = to_pt2.convert(made, Options(dynamic=frozenset({'batch'})), path)
    check_accuracy(to_pt2.load(path), made)
    check_outputs(to_pt2, path, made, shapes=[(1, None), (3, None)])
    printed = capfd.readouterr()
    assert printed.out == printed.err == ''
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert to_pt2.read_metadata(path) == made.metadata
    assert conversion.operators['aten.conv2d.default'] > 5
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        text = b''.join(archive.read(entry) for entry in archive.namelist() if entry.endswith('.json'))
    assert b'.py' not in text, 'the archive holds paths of the sources'
    if name == 'pt2':
        extra = {'subquad.json': ''}
        torch.export.load(path, extra_files=extra)
        assert json.loads(extra['subquad.json']) == made.metadata
        with pytest.raises(RuntimeError, match=r'shape\[2\] to be equal to 32, but got 64'):
            to_pt2.load(path)(made.example(1, (64, 64)))


@pytest.mark.parametrize('name', ['pt2', aoti])
def test_threads(name, tmp_path, monkeypatch):
    """The files compute with the threads of PyTorch, and a call leaves their number as it was."""
    made, path = small_classifier(), tmp_path / f'a{FORMATS[name].suffix}'
    to_pt2.convert(made, Options(), path)
    run, before, numbers = to_pt2.load(path, 2), torch.get_num_threads(), []
    change = torch.set_num_threads
    monkeypatch.setattr(torch, 'set_num_threads', lambda number: (numbers.append(number), change(number)))
    run(made.example())
    assert numbers == [2, before] and torch.get_num_threads() == before


@pytest.mark.slow
def test_dynamic_height_and_width(tmp_path):
    made = subject_of('test_mobilevitv2', size=(64, 64))
    report = export(made, 'pt2', tmp_path / 'a.pt2', Options(dynamic=frozenset({'batch', 'hw'})), repeats=0)
    assert report.passed and report.errors.relative < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('name', ['pt2', aoti])
def test_every_family(name, family, features, tmp_path):
    report = export(subject_of(family, features=features), name, tmp_path / f'a{FORMATS[name].suffix}', repeats=0)
    assert report.passed and report.errors.relative < 1e-5


@pytest.mark.parametrize('name', ['a.pt2', 'a.aoti.pt2'])
def test_files_that_are_no_archives(name, tmp_path):
    path = tmp_path / name
    for content in (None, b'no archive'):
        if content:
            path.write_bytes(content)
        for read in (to_pt2.load, to_pt2.read_metadata):
            with pytest.raises(UserError, match=f'{name} has no metadata of `subquad export`'):
                read(path)
    path.unlink()
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.zeros(2),)), path)
    with pytest.raises(UserError, match='has no metadata'):
        to_pt2.load(path)


def test_without_a_compiler_nothing_is_written(tmp_path, monkeypatch, capsys):
    from torch._inductor import cpp_builder

    def missing():
        raise RuntimeError('No working C++ compiler found')
    monkeypatch.setattr(cpp_builder, 'get_cpp_compiler', missing)
    arguments = ['test_ppma.digits', '--repeats', '0', '--out', str(tmp_path / 'new'), '--format']
    with pytest.raises(UserError, match=r'aoti needs a C\+\+ compiler, and none was found: install g\+\+'):
        command.main([*arguments, 'aoti'])
    assert not (tmp_path / 'new').exists()
    monkeypatch.setattr(formats, 'FORMATS', {name: FORMATS[name] for name in ('pt2', 'aoti')})
    assert command.main([*arguments, 'all']) == 0
    assert [file.name for file in (tmp_path / 'new').iterdir()] == ['test_ppma.pt2']
    assert r'left out: the format aoti needs a C++ compiler' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['pt2', 'aoti'])
def test_other_precisions_are_refused(name, tmp_path):
    with pytest.raises(UserError, match=f'the format {name} has no precision fp16 here; allowed are fp32'):
        command.main(['test_ppma', '--format', name, '--precision', 'fp16', '--out', str(tmp_path / 'new')])
    assert not (tmp_path / 'new').exists()
