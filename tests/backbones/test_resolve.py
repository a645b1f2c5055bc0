"""One resolver finds weights by path or by name, with errors that name the nearest weights."""
import pytest
from published_files import serve

from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.resolve import published, resolve


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Names that are downloaded."""
    return serve(monkeypatch, {name: tmp_path / 'cache' / name for name in (
        'ppma_tiny.in1k', 'ppma_tiny.mask_rcnn_1x_coco', 'subquad_mobilevitv2_050.cvnets_in1k')})


@pytest.mark.parametrize('name, expected', [
    ('ppma_tiny.in1k', 'ppma_tiny.in1k'), ('subquad://ppma_tiny.in1k', 'ppma_tiny.in1k'),
    ('ppma_tiny', 'ppma_tiny.in1k'), ('subquad://subquad_mobilevitv2_050', 'subquad_mobilevitv2_050.cvnets_in1k'),
    ('ppma_tiny.mask_rcnn_1x_coco', 'ppma_tiny.mask_rcnn_1x_coco')])
def test_names_of_published_weights_are_downloaded(name, expected, asked, tmp_path):
    assert published(name).name == expected and asked == []
    assert resolve(name) == tmp_path / 'cache' / expected and asked == [expected]


def test_existing_files_come_before_published_weights(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'ppma_tiny.in1k').write_bytes(b'')
    (tmp_path / 'ppma_small').mkdir()
    for name in ('ppma_tiny.in1k', './ppma_tiny.in1k', tmp_path / 'ppma_tiny.in1k', '~/ppma_tiny.in1k'):
        assert published(name) is None
        assert resolve(name).resolve() == (tmp_path / 'ppma_tiny.in1k').resolve()
    assert asked == []
    assert resolve('subquad://ppma_tiny.in1k') == tmp_path / 'cache' / 'ppma_tiny.in1k'
    assert published('ppma_small').name == 'ppma_small.in1k', 'a folder is no weight file'


@pytest.mark.parametrize('name, message', [
    ('ppma_tinny.in1k', r'^no weight file at ppma_tinny.in1k, and no weights of ppma_tinny.in1k are published; did you '
                        r'mean ppma_tiny.in1k, .*subquad weights list'),
    ('ppma_tiny.in22k', r'^no weight file at ppma_tiny.in22k, and there are no weights ppma_tiny.in22k; ppma_tiny has '
                        'ppma_tiny.in1k, ppma_tiny.mask_rcnn_1x_coco'),
    ('subquad://ppma_tiny.in22k', '^there are no weights ppma_tiny.in22k; ppma_tiny has ppma_tiny.in1k'),
    ('subquad://', 'the name of the weights is empty'),
    ('subquad://runs/best.pth', 'no weights of runs/best.pth are published'),
    ('myo_tiny', r'^no weight file at myo_tiny, and no weights of myo_tiny are published'),
    ('best', '^no weight file at best, and no weights of best are published'),
    ('best.pth', '^no weight file at best.pth$'),
    ('ppma_tiny.safetensors', '^no weight file at ppma_tiny.safetensors$'),
    ('runs/ppma_tiny.in1k', '^no weight file at runs/ppma_tiny.in1k$'),
    ('~/none.pth', '^no weight file at ~/none.pth$'),
    ('~nobody_of_this_name/w.pth', r'^~nobody_of_this_name/w.pth: '), ('\0.pth', 'no weight file'),
    ('https://example.org/w.pth', r'^https://example.org/w.pth is an address: download the file first, or give '
                                  'subquad://NAME'),
    ('', '^the name of the weights is empty')])
def test_unknown_names_raise_one_sentence(name, message, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError, match=message) as caught:
        resolve(name)
    assert '\n' not in str(caught.value) and asked == []
