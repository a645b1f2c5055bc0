"""subquad visualize: pictures of context scores, and what is refused."""
import pytest
import timm
import torch
from PIL import Image

from subquad.backbones.weights import save_weights
from subquad.tools import visualize
from subquad.tools.common.cli import UserError
from subquad.tools.engine.drawing import pictures


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    for name, options, file in (('test_mobilevitv2', dict(num_latent_tokens=2), ''), ('test_ppma', {}, ''),
                                ('test_myo', {}, ''), ('test_ppma', dict(paths='none'), 'plain'),
                                ('resnet18', {}, '')):
        model = timm.create_model(name, num_classes=3, **options)
        save_weights(model, tmp_path / f'{file or name}.safetensors',
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


def test_decay_factors(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert visualize.main(['test_ppma.safetensors', 'images']) == 0
    assert 'decay_factors.png: 3 image(s), 5 layer(s)' in capsys.readouterr().out
    wide = Image.open('decay_factors.png').size
    assert visualize.main(['test_ppma.safetensors', 'images', '--layers', 'stages.2', '--out', 'a.png']) == 0
    assert Image.open('a.png').size[0] < wide[0] and Image.open('a.png').size[1] == wide[1]


def test_decay_factors_equal_those_of_the_mixers(folder):
    """exp of the step logs that each mixer gets, mean over heads; horizontal and vertical are not exchanged."""
    model, seen = timm.create_model('test_ppma', num_classes=3), []
    mixer = model.stages[2].blocks[1].mixer
    mixer.register_forward_hook(lambda module, inputs, output: seen.append(module.decay_logs(inputs[0])))
    found = pictures.decay_factors(model, torch.randn(2, 3, 64, 96))
    assert len(found) == 5 and model.training
    for factors, logs in zip(found['stages.2.blocks.1'], seen[0]):
        assert factors.shape == (2, 4, 6) and torch.allclose(factors, logs.exp().mean(1))
    assert not torch.allclose(*found['stages.2.blocks.1'])


def test_pictures_are_labeled(folder, monkeypatch):
    """A title, a color bar with a label, and layers above the maps, in all three families."""
    figures = []
    monkeypatch.setattr(pictures, 'save', lambda figure, path: figures.append(figure))
    from subquad.tools.engine.drawing import influences
    monkeypatch.setattr(influences, 'save', pictures.save)
    for name, label in (('test_mobilevitv2', 'context score'), ('test_ppma', 'factor per step'),
                        ('test_myo', 'influence and edges')):
        visualize.main([str(folder / f'{name}.safetensors'), str(folder / 'images'), '--most', '2'])
        figure = figures.pop()
        assert figure.get_suptitle().startswith(f'{name}: ')
        bar = next(axis for axis in figure.axes if axis.get_label() == '<colorbar>')
        assert label in bar.get_ylabel() and [tick.get_text() for tick in bar.get_yticklabels()]
        assert {axis.get_title().split('\n')[0] for axis in figure.axes} >= {'image', 'stages.2.1' if 'mobile' in name
                                                                             else 'stages.2'}
        assert {axis.get_ylabel() for axis in figure.axes} >= {'0', '1'}
    assert {axis.get_xlabel() for axis in figure.axes} == {'', 'height in the tree'}


def test_pictures_show_the_input_images(folder):
    from timm.data import create_transform
    transform = create_transform((3, 64, 96), crop_pct=1.0)
    image = Image.open(folder / 'images' / '1.png')
    drawn = pictures.unnormalized(transform(image)[None], transform)[0]
    assert torch.allclose(drawn, torch.tensor([80, 20, 120])[:, None, None].expand(3, 64, 96) / 255, atol=1e-2)


def test_overlay_colors_the_largest_scores():
    """The token of the largest score is red, one of the smallest blue, over an image of one color."""
    scores = torch.zeros(2, 3)
    scores[1, 2] = 1
    picture = pictures.overlay(torch.full((8, 12, 3), 0.5), scores)
    image = torch.rand(8, 12, 3)
    assert (pictures.overlay(image, torch.full((2, 3), 0.25)) == image.numpy()).all()
    assert picture.shape == (8, 12, 3) and picture[7, 11, 0] > picture[7, 11, 2] and picture[0, 0, 2] > picture[0, 0, 0]


@pytest.mark.parametrize('arguments, message', [
    (['resnet18.safetensors', 'images'], 'ResNet has no maps to draw'),
    (['test_ppma.safetensors', 'images', '--layers', 'stages.7'], '--layers stages.7: no such layer'),
    (['plain.safetensors', 'images'], "paths='none': its attention does not decay"),
    (['test_mobilevitv2.safetensors', 'images', '--layers', 'stages.9'], '--layers stages.9: no such layer'),
    (['test_mobilevitv2.safetensors', 'images', '--most', '0'], '--max-images must be at least 1, got 0'),
    (['test_mobilevitv2.safetensors', 'nothing'], 'no file or folder'),
    (['test_myo.safetensors', 'images', '--at', '1', '0'], 'fractions of height and width from 0 to below 1'),
    (['nothing.safetensors', 'images'], 'no weight file at'),
    (['test_mobilevitv2.safetensors', 'test_ppma.safetensors'], 'is not an image that can be read'),
    (['test_mobilevitv2.safetensors', 'images', '--out', 'picture.txt'], '--out must end in .png, .jpg, .pdf or')])
def test_wrong_arguments(arguments, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = set(folder.rglob('*'))
    with pytest.raises(UserError, match=message):
        visualize.main(arguments)
    assert set(folder.rglob('*')) == before
