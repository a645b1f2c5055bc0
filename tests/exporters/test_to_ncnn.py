"""ncnn: the files run within the tolerances, hold only layers of ncnn, and what cannot be kept is refused."""
import json
from dataclasses import replace

import pytest
import torch
from digits_exports import check_accuracy, digits_subject
from export_cases import subject_of
from families import FAMILIES
from pairwise import slow_cases
from torch import nn

from subquad.tools.common.cli import UserError
from subquad.tools.exporters import to_ncnn
from subquad.tools.exporters.formats import Options
from subquad.tools.exporters.pipeline import export

pytest.importorskip('ncnn')
pytest.importorskip('pnnx')


def made(name, **options):
    """The subject of this name, with the bundled weights NAME.digits and random weights otherwise."""
    name, _, digits = name.partition('.')
    return digits_subject(name) if digits else subject_of(name, **options)


def exported(folder, name, precision='fp32', **options):
    subject = made(name, **options)
    return export(subject, 'ncnn', folder / f'{subject.name}.ncnn.param', Options(precision), repeats=0)


@pytest.mark.parametrize('name, precision, options', [
    ('test_ppma.digits', 'fp16', dict()),
    ('test_mobilevitv2', 'fp32', dict(size=(64, 96), features=True)),
    *slow_cases(('test_myo', 'fp32', dict(features=True)), ('test_myo', 'fp32', dict(size=(84, 59))),
                ('test_ppma', 'fp32', dict(size=(84, 59), features=True)))])
def test_networks_run_as_the_ordinary_model(name, precision, options, tmp_path):
    report, subject = exported(tmp_path, name, precision, **options), made(name, **options)
    low, high = (1e-6, 1e-2) if precision == 'fp16' else (0, 1e-5)
    assert report.passed and low <= report.errors.relative < high
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f'{subject.name}.json', f'{subject.name}.ncnn.bin', f'{subject.name}.ncnn.param']
    parameters = sum(p.numel() for p in subject.module.parameters())
    weights = (tmp_path / f'{subject.name}.ncnn.bin').stat().st_size / parameters
    assert weights < (2.7 if precision == 'fp16' else 5.4)
    assert options.get('features') or weights > (1.9 if precision == 'fp16' else 3.8)      # a pyramid has no head
    metadata = to_ncnn.read_metadata(report.path)
    assert metadata['model'] == subject.name and metadata['format'] == 'ncnn'
    assert len(metadata['outputs']) == len(subject.outputs)
    assert report.conversion.operators['Convolution'] > 5
    if subject.metadata['weights'] != 'random':
        check_accuracy(to_ncnn.load(report.path), subject, precision)
    run, image = to_ncnn.load(report.path, threads=2), subject.example()
    assert all(map(torch.equal, run(image.contiguous(memory_format=torch.channels_last)), run(image)))
    with pytest.raises(UserError, match='one image at a time, got 2'):
        run(torch.zeros(2, *metadata['input']['shape'][1:]))


class Unknown(nn.Module):
    def forward(self, images):
        return (torch.special.bessel_j0(images).mean((2, 3)),)


def test_operators_without_a_layer_are_named(tmp_path):
    subject = replace(subject_of('test_mobilevitv2'), module=Unknown())
    with pytest.raises(UserError, match=r'no layers for these operators of test_mobilevitv2: .*bessel_j0'):
        to_ncnn.convert(subject, Options(), tmp_path / 'a.ncnn.param')
    assert not list(tmp_path.iterdir())


def test_broken_files(tmp_path):
    path = tmp_path / 'a.ncnn.param'
    path.write_text('no graph')
    with pytest.raises(UserError, match=r'a\.json with the metadata cannot be read'):
        to_ncnn.load(path)
    (tmp_path / 'a.json').write_text(json.dumps(dict(outputs=[dict(name='logits', shape=[1, 10])])))
    with pytest.raises(UserError, match=r'a\.ncnn\.bin are not a network'):
        to_ncnn.load(path)
    (tmp_path / 'a.ncnn.bin').write_bytes(b'')
    with pytest.raises(UserError, match=r'a\.ncnn\.bin are not a network'):
        to_ncnn.load(path)


def test_transposes_and_aliases_that_pnnx_does_not_know(tmp_path):
    assert exported(tmp_path, 'test_mambavision').errors.relative < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('precision', ['fp32', 'fp16'])
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('name', ['ppma_tiny', 'myo_tiny', 'subquad_mobilevitv2_050', *FAMILIES])
def test_every_family(name, features, precision, tmp_path):
    assert exported(tmp_path, name, precision, features=features).passed
