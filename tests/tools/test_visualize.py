"""subquad visualize: pictures of context scores, and what is refused."""
import pytest
import timm
import torch
from PIL import Image

from subquad.backbones.mixers.eos_decay import memory_lengths
from subquad.backbones.weights import load_weights, save_weights
from subquad.tools import visualize
from subquad.tools.common.cli import UserError
from subquad.tools.engine.drawing import influences, memories, pictures


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    for name, options, file in (('test_mobilevitv2', dict(num_latent_tokens=2), ''), ('test_ppma', {}, ''),
                                ('test_myo', {}, ''), ('test_ppma', dict(paths='none'), 'plain'),
                                ('resnet18', {}, ''), ('test_lcsm', {}, ''),
                                ('test_lcsm', dict(mixer='1-6-1-0', mode='raster'), 'full_rank'),
                                ('test_lcsm', dict(mixer='retnet'), 'retnet'),
                                ('test_lcsm', dict(mixer='deltanet'), 'deltanet')):
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


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, instead of files."""
    found = []
    for module in (pictures, influences, memories):
        monkeypatch.setattr(module, 'save', lambda figure, path: found.append(figure))
    return found


def labels(figure):
    """The labels of x and y axes."""
    return {axis.get_xlabel() for axis in figure.axes}, {axis.get_ylabel() for axis in figure.axes}


def test_state_decays(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert visualize.main(['test_lcsm.safetensors', 'images', '--max-images', '2']) == 0
    assert 'state_decays.png: 2 image(s), 5 layer(s)' in capsys.readouterr().out
    tall = Image.open('state_decays.png').size[1]
    assert visualize.main(['test_lcsm.safetensors', 'images', '--max-images', '1', '--out', 'one.png']) == 0
    assert Image.open('one.png').size[1] < tall


def test_state_decays_have_numbers_and_units(folder, figures):
    """Two color bars with numbers for each image, and charts of all heads, with the values of the mixers."""
    model, image = timm.create_model('test_lcsm', num_classes=3), str(folder / 'images' / '1.png')
    assert visualize.main([str(folder / 'test_lcsm.safetensors'), image]) == 0
    figure = figures.pop()
    assert figure.get_suptitle().startswith('test_lcsm: how fast the memories of the recurrence decay')
    assert 'tokens until the product of decays falls to 1/e' in figure.get_suptitle()
    below, beside = labels(figure)
    assert below >= {'decay per token', 'length, tokens'}
    assert beside >= {'1', 'decay', 'length\nalong rows', 'length\nalong columns', 'decay per token', 'tokens', 'head'}
    bars = [axis for axis in figure.axes if axis.get_label() == '<colorbar>']
    numbers = [[float(tick.get_text()) for tick in axis.get_yticklabels()] for axis in bars]
    assert len(numbers) == 3 and all(len(set(ticks)) == 3 for ticks in numbers)
    assert all(0.8 < ticks[0] < ticks[2] < 1 for ticks in numbers[:1]) and numbers[1][2] > 5
    titles = {axis.get_title() for axis in figure.axes}
    assert {'stages.0\nblock 0\n1 token = 4 px', 'stages.3\nblock 0\n1 token = 32 px'} <= titles
    charts = [axis for axis in figure.axes if axis.get_xlabel() == 'decay per token']
    assert [len(axis.get_yticks()) for axis in charts] == [1, 3, 2, 2, 3]
    maps = [axis.images[0] for axis in figure.axes if axis.images and axis.get_label() != '<colorbar>'][1:]
    assert [x.get_cmap().name for x in maps] == ['viridis'] * 5 + ['magma'] * 10
    load_weights(model, folder / 'test_lcsm.safetensors')
    from timm.data import create_transform
    inputs = create_transform((3, 64, 96), crop_pct=1.0)(Image.open(image).convert('RGB'))[None]
    wanted = model.state_decays(inputs)['stages.1.blocks.0'].logs.mean(1).exp()[0]
    assert torch.allclose(torch.as_tensor(maps[1].get_array()), wanted, atol=1e-6)
    wanted = memory_lengths(model.state_decays(inputs)['stages.0.blocks.0'].logs, 2)[0, 0]
    assert torch.allclose(torch.as_tensor(maps[10].get_array()), wanted, rtol=1e-5)


def test_state_decays_of_heads_and_of_raster_lines(folder, figures):
    arguments = [str(folder / 'full_rank.safetensors'), str(folder / 'images' / '0.png'), '--heads']
    assert visualize.main([*arguments, '--layers', 'stages.1', 'stages.2']) == 0
    figure = figures.pop()
    assert {axis.get_title() for axis in figure.axes} >= {'stages.1\nblock 0\nhead 2', 'stages.2\nblock 1\nhead 1'}
    assert 'length\nalong the scan' in labels(figure)[1] and 'length\nalong rows' not in labels(figure)[1]


def test_memories_of_one_direction():
    model, images = timm.create_model('test_lcsm', mode='forward'), torch.randn(1, 3, 64, 32)
    found, decays = memories.memories(model, images), model.state_decays(images)
    for name, memory in found.items():
        lines = decays[name].logs.flatten(2)
        assert list(memory.lengths) == ['raster']
        assert torch.equal(memory.lengths['raster'].flatten(2), memory_lengths(lines, 2, False))


def test_constant_decays_have_charts_alone(folder, figures):
    assert visualize.main([str(folder / 'retnet.safetensors'), str(folder / 'images')]) == 0
    figure = figures.pop()
    assert not any(axis.images for axis in figure.axes)
    assert 'All tokens of all images decay alike' in figure.get_suptitle()
    below, _ = labels(figure)
    assert below == {'', 'decay per token', 'length, tokens'}
    (line,) = next(axis for axis in figure.axes if axis.get_xlabel() == 'decay per token').lines
    assert line.get_xdata().tolist() == [pytest.approx(1 - 2 ** -5)]


def test_images_at_their_own_size(folder, figures):
    """Images of 100 x 70 pixels have 25 x 18 tokens of 4 pixels."""
    assert visualize.main([str(folder / 'test_lcsm.safetensors'), str(folder / 'images'), '--own-size']) == 0
    sizes = [axis.images[0].get_array().shape[:2] for axis in figures.pop().axes if axis.images]
    assert sizes.count((70, 100)) == 3 and sizes.count((18, 25)) == 9


def test_pictures_are_labeled(folder, figures):
    """A title, a color bar with a label, and layers above the maps, in three families."""
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
    (['deltanet.safetensors', 'images'], "mixer='deltanet' has no decay for each token: its oscillation is a matrix"),
    (['test_myo.safetensors', 'images', '--heads'], '--heads is for LCSM, and Myo has no state decays'),
    (['test_lcsm.safetensors', 'images', '--at', '0', '0'], '--at is for Myo: the maps of LCSM'),
    (['test_lcsm.safetensors', 'images', 'other', '--own-size'], 'must have the same size: .* x '),
    (['nothing.safetensors', 'images'], 'no weight file at'),
    (['test_mobilevitv2.safetensors', 'test_ppma.safetensors'], 'is not an image that can be read'),
    (['test_mobilevitv2.safetensors', 'images', '--out', 'picture.txt'], '--out must end in .png, .jpg, .pdf or')])
def test_wrong_arguments(arguments, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / 'other').mkdir()
    Image.new('RGB', (90, 70)).save(folder / 'other' / 'image.png')
    before = set(folder.rglob('*'))
    with pytest.raises(UserError, match=message):
        visualize.main(arguments)
    assert set(folder.rglob('*')) == before
