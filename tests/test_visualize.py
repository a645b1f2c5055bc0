"""subquad visualize: pictures of context scores, and what is refused."""
import pytest
import timm
import torch
from PIL import Image

from subquad.backbones.weights import save_weights
from subquad.tools import visualize
from subquad.tools.cli import UserError


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    for name, options in (('test_mobilevitv2', dict(num_latent_tokens=2)), ('test_ppma', {}), ('test_myo', {})):
        model = timm.create_model(name, num_classes=3, **options)
        save_weights(model, tmp_path / f'{name}.safetensors',
                     dict(model=name, options=dict(num_classes=3, **options), classes=['a', 'b', 'c'],
                          transform=dict(input_size=(3, 64, 96), crop_pct=1.0)))
    (tmp_path / 'images').mkdir()
    for n in range(3):
        Image.new('RGB', (100, 70), (80 * n, 20, 120)).save(tmp_path / 'images' / f'{n}.png')
    return tmp_path


def test_a_picture(folder, capsys):
    arguments = [str(folder / 'test_mobilevitv2.safetensors'), str(folder / 'images'), '--out']
    assert visualize.main([*arguments, str(folder / 'new' / 'all.png')]) == 0
    assert '3 image(s), 9 layer(s)' in capsys.readouterr().out
    wide = Image.open(folder / 'new' / 'all.png').size
    assert visualize.main([*arguments, str(folder / 'one.png'), '--layers', 'stages.3', '--most', '2']) == 0
    assert '2 image(s), 4 layer(s)' in capsys.readouterr().out
    narrow = Image.open(folder / 'one.png').size
    assert narrow[0] < wide[0] and narrow[1] < wide[1]


def test_influences(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert visualize.main(['test_myo.safetensors', 'images', '--at', '0.2', '0.9']) == 0
    assert 'influences.png: 3 image(s), 5 layer(s)' in capsys.readouterr().out
    assert Image.open('influences.png').size[1] > 1000
    arguments = ['test_myo.safetensors', 'images', '--most', '1', '--layers', 'stages.2', '--out', 'a.png']
    assert visualize.main(arguments) == 0
    assert '1 image(s), 2 layer(s)' in capsys.readouterr().out


def test_scores_colour_their_place():
    """The token of the largest score is red, one of the smallest blue, over an image of one colour."""
    scores = torch.zeros(2, 3)
    scores[1, 2] = 1
    picture = visualize.overlay(torch.full((8, 12, 3), 0.5), scores)
    image = torch.rand(8, 12, 3)
    assert (visualize.overlay(image, torch.full((2, 3), 0.25)) == image.numpy()).all()
    assert picture.shape == (8, 12, 3) and picture[7, 11, 0] > picture[7, 11, 2] and picture[0, 0, 2] > picture[0, 0, 0]


@pytest.mark.parametrize('arguments, message', [
    (['test_ppma.safetensors', 'images'], 'PPMA has nothing to draw here'),
    (['test_mobilevitv2.safetensors', 'images', '--layers', 'stages.9'], '--layers stages.9: no such layer'),
    (['test_mobilevitv2.safetensors', 'images', '--most', '0'], '--most must be at least 1, got 0'),
    (['test_mobilevitv2.safetensors', 'nothing'], 'no file or folder'),
    (['test_myo.safetensors', 'images', '--at', '1', '0'], 'shares of height and width from 0 to below 1'),
    (['nothing.safetensors', 'images'], 'no weight file at'),
    (['test_mobilevitv2.safetensors', 'test_ppma.safetensors'], 'is not an image that can be read'),
    (['test_mobilevitv2.safetensors', 'images', '--out', 'picture.txt'], '--out must end in .png, .jpg, .pdf or')])
def test_wrong_arguments(arguments, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = set(folder.rglob('*'))
    with pytest.raises(UserError, match=message):
        visualize.main(arguments)
    assert set(folder.rglob('*')) == before
