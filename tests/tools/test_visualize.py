"""subquad visualize: what the panels show, figures and pages."""
import base64
import json
import re

import pytest
import timm
import torch
from browser import browser, missing_programs, served
from PIL import Image

import subquad
from subquad.backbones.influence import observed_mixers, polyline_mask
from subquad.backbones.mixers.eos_decay import memory_lengths
from subquad.backbones.weights import load_weights
from subquad.tools import visualize
from subquad.tools.engine.drawing import panels, pictures, visualization, webpage

SIZE = (70, 100)                                         # of the images: 18 x 25 tokens at stride 4


def model_and_input(folder, name, **options):
    """The model of a weight file, and the image 1.png as it sees it."""
    model = timm.create_model(name, num_classes=3, **options).eval()
    load_weights(model, folder / f'{name}.safetensors')
    from timm.data import create_transform
    inputs = create_transform(SIZE, crop_pct=1.0)(Image.open(folder / 'images' / '1.png'))[None]
    return model, inputs


def panels_of(picture):
    """The panels of a picture by the first lines of their titles, row after row."""
    return [{panel.title.split('\n')[0]: panel for panel in row.panels} for row in picture.rows]


def test_a_picture(folder, capsys):
    arguments = ['test_mobilevitv2.safetensors', 'images', '--out']
    assert visualize.main([*arguments, 'new/all.png']) == 0
    assert '3 image(s), 3 layer(s), context' in capsys.readouterr().out
    wide = Image.open('new/all.png').size
    assert visualize.main([*arguments, 'one.png', '--layers', 'stages.3', '--max-images', '2', '--dpi', '60']) == 0
    assert '2 image(s), 4 layer(s)' in capsys.readouterr().out
    assert Image.open('one.png').size[0] < wide[0]


def test_figures_have_titles_numbers_and_the_shape_of_the_image(folder, monkeypatch):
    seen = []
    monkeypatch.setattr(visualization, 'save', lambda figure, path, dpi: seen.append(figure))
    assert visualize.main(['test_ppma.safetensors', 'images/1.png']) == 0
    figure, = seen
    assert figure.get_suptitle() == ('test_ppma, weights test_ppma.safetensors\nIts own input size is 64 x 96 pixels. '
                                     'Maps of layers are means over heads.')
    assert len(figure.axes) == 4 * 6
    axes = [axis for axis in figure.axes if axis.images]
    assert len(axes) == 1 + 4 * 5
    for axis in axes:
        assert axis.get_title() and axis.images[0].get_extent() == [0, 100, 70, 0] and axis.get_aspect() == 1
        assert axis.images[0].get_cmap().name in ('viridis', 'magma') or axis is axes[0]
    for axis in axes[1:]:
        bar, = axis.child_axes
        numbers = [float(tick.get_text()) for tick in bar.get_yticklabels()]
        assert numbers == sorted(set(numbers)) and len(numbers) == 3 and axis.get_xlabel()
    assert {axis.get_ylabel() for axis in axes} == {'', *(f'stages.{n}.blocks.{n == 2:d}\n{rows} x {columns} tokens\n'
                                                          f'of {70 / rows:.3g} px' for n, (rows, columns)
                                                          in enumerate([(18, 25), (9, 13), (5, 7), (3, 4)]))}
    crosses = [axis.lines[-1].get_xydata().tolist() for axis in axes if axis.lines]
    assert len(crosses) == 1 + 4 * 3 and all(cross == [[50.5, 35.5]] for cross in crosses)


@pytest.mark.parametrize('name', ['test_ppma', 'multiplicative'])
def test_panels_of_ppma(folder, drawn, name):
    """Decay factors, mask and attention are those of the mixers: means over heads, at the token of the pixel."""
    assert visualize.main([f'{name}.safetensors', 'images/1.png', '--at', '0.1', '0.9', '--layers', 'stages.2']) == 0
    model, inputs = model_and_input(folder, 'test_ppma', mask_mode='multiplicative' if name != 'test_ppma'
                                    else 'additive')
    load_weights(model, folder / f'{name}.safetensors')
    found, layers = panels_of(drawn[0])[1], observed_mixers(model, inputs)
    layer = layers['stages.2.blocks.1']
    alpha, beta = (logs.detach().exp()[0].mean(0) for logs in layer.mixer.decay_logs(layer.x))
    token = (7 * 5 // 70, 90 * 7 // 100)
    masked = 'additive: log mask added to logits' if name == 'test_ppma' else 'multiplicative: attention x mask'
    assert drawn[0].place == (7.5 / 70, 90.5 / 100) and masked in found['masked attention of +'].title
    weights = subquad.influence(model, inputs, (7, 90))['stages.2.blocks.1'].weights[0].mean(0)
    for title, expected in (('horizontal decay α', alpha), ('vertical decay β', beta),
                            ('polyline mask of +', polyline_mask(layer.mixer, layer.x, token)[0].mean(0)),
                            ('masked attention of +', weights)):
        assert torch.allclose(found[title].values.float(), expected, atol=1e-6), title
    assert not torch.allclose(alpha, beta) and abs(float(found['attention map of +'].values.sum()) - 1) < 1e-5
    assert float(found['polyline mask of +'].values.max()) == pytest.approx(2)


def test_panels_of_myo(folder, drawn):
    assert visualize.main(['test_myo.safetensors', 'images/1.png']) == 0
    model, inputs = model_and_input(folder, 'test_myo')
    layer, found = observed_mixers(model, inputs)['stages.0.blocks.0'], panels_of(drawn[0])[0]
    assert [panel.title.split('\n')[0] for panel in drawn[0].rows[0].panels] == [
        'influence of every token', 'share of the influence on +', 'weights of the edges from tokens',
        'standard deviation of each token']
    with torch.no_grad():
        edges = layer.mixer.edges(layer.x, layer.mixer.levels(18, 25))[0][0].mean(0).double()
        deviation = layer.mixer.standard_deviation(layer.x)[0].mean(0).double()
    assert torch.allclose(found['weights of the edges from tokens'].values, edges)
    assert torch.allclose(found['standard deviation of each token'].values, deviation)
    assert float(found['influence of every token'].values.sum()) == pytest.approx(1, abs=1e-5)


def test_signed_influences_have_a_diverging_scale(folder, drawn, capsys):
    assert visualize.main(['skew.safetensors', 'images/1.png']) == 0
    assert 'left out the panel deviation of stages.0.blocks.0' in capsys.readouterr().err
    panel = panels_of(drawn[0])[0]['influence of every token']
    low, high, _ = panels.limits(panel)
    assert panel.scale == 'signed' and low == -high and panels.SCALES['signed'][0] == 'RdBu_r'


def test_panels_of_lcsm(folder, drawn):
    assert visualize.main(['test_lcsm.safetensors', 'images/1.png', '--layers', 'stages.0']) == 0
    model, inputs = model_and_input(folder, 'test_lcsm')
    decays = model.state_decays(inputs)['stages.0.blocks.0']
    assert [len(picture.rows) for picture in drawn[:1]] == [1] and drawn[0].place is None
    found = drawn[0].rows[0].panels
    assert torch.allclose(found[0].values.float(), decays.logs[0, 0].exp(), atol=1e-6)
    for panel, dim in zip(found[1:3], (3, 2)):
        assert torch.allclose(panel.values, memory_lengths(decays.logs, dim)[0, 0], rtol=1e-5)
        assert panel.label == 'tokens' and panel.scale == 'logarithmic'
    drawn.clear()
    assert visualize.main(['test_lcsm.safetensors', 'images/1.png', '--layers', 'stages.1', '--heads']) == 0
    assert [row.label.split('\n')[-1] for row in drawn[0].rows] == ['head 0', 'head 1', 'head 2']


def test_constant_decays_have_charts_alone(folder, drawn, capsys):
    assert visualize.main(['retnet.safetensors', 'images/1.png']) == 0
    assert 'left out the panel decay' in capsys.readouterr().err
    axis = __import__('matplotlib.figure').figure.Figure().subplots()
    charts = drawn[0].rows[0].panels
    assert len(charts) == 2 and all(isinstance(chart, panels.Chart) for chart in charts)
    charts[0].draw(axis)
    assert axis.lines[0].get_xdata().tolist() == [pytest.approx(1 - 2 ** -5)]


def test_context_scores_stand_in_one_row(folder, drawn):
    assert visualize.main(['test_mobilevitv2.safetensors', 'images/1.png']) == 0
    model, inputs = model_and_input(folder, 'test_mobilevitv2', num_latent_tokens=2)
    row, = drawn[0].rows
    assert [panel.title.split('\n')[0] for panel in row.panels] == [
        'stages.2.1.transformer.1', 'stages.3.1.transformer.3', 'stages.4.1.transformer.2']
    scores = model.context_scores(inputs)['stages.3.1.transformer.3'][0].mean(0)
    assert torch.allclose(row.panels[1].values.float(), scores, atol=1e-6)
    assert 'uniform: 0.083' in row.panels[1].label and float(scores.sum()) == pytest.approx(4, rel=1e-4)


@pytest.mark.parametrize('name', ['test_resnet', 'test_ppma'])
def test_receptive_field_and_activation(folder, drawn, name):
    arguments = [f'{name}.safetensors', 'images/1.png', '--panels', 'receptive-field', 'activation', '--target', 'b']
    assert visualize.main([*arguments, '--at', '0.5', '0']) == 0
    model, inputs = model_and_input(folder, name)
    field, activation = drawn[0].rows[0].panels
    assert torch.allclose(field.values, subquad.effective_receptive_field(model, inputs, (35, 0))[0])
    assert torch.allclose(activation.values, subquad.class_activation(model, inputs, 1).maps[0])
    assert re.fullmatch(r'class activation \(Grad-CAM\):\nb, probability 0\.\d+', activation.title)
    assert activation.over_image and re.fullmatch(r'predicted: [a-z], \d+%', drawn[0].predicted)


def test_random_weights_are_named(folder, drawn, capsys):
    assert visualize.main(['test_resnet', 'images/1.png', '--random', '--panels', 'activation']) == 0
    assert 'test_resnet has random weights: the picture shows an untrained model' in capsys.readouterr().out
    assert drawn[-1].startswith('test_resnet, random weights (untrained)')


def test_pictures_show_the_input_images(folder):
    from timm.data import create_transform
    transform = create_transform((3, 64, 96), crop_pct=1.0)
    drawn = pictures.unnormalized(transform(Image.new('RGB', (9, 9), (80, 20, 120)))[None], transform)[0]
    assert torch.allclose(drawn, torch.tensor([80, 20, 120])[:, None, None].expand(3, 64, 96) / 255, atol=1e-2)


def test_decay_factors_equal_those_of_the_mixers(folder):
    """exp of the step logs that each mixer gets, mean over heads; horizontal and vertical are not exchanged."""
    model, seen = timm.create_model('test_ppma', num_classes=3), []
    mixer = model.stages[2].blocks[1].mixer
    mixer.register_forward_hook(lambda module, inputs, output: seen.append(module.decay_logs(inputs[0])))
    found = pictures.decay_factors(model, torch.randn(2, 3, 64, 96))
    assert len(found) == 5 and model.training
    for factors, logs in zip(found['stages.2.blocks.1'], seen[0]):
        assert factors.shape == (2, 4, 6) and torch.allclose(factors, logs.exp().mean(1))


def test_a_page_is_one_file_with_maps_that_follow_the_pixel(folder):
    """Frames hold the influence of every chosen pixel; nothing is loaded from elsewhere."""
    arguments = ['test_ppma.safetensors', 'images/1.png', '--out', 'page.html', '--layers', 'stages.2.blocks.1']
    assert visualize.main(arguments) == 0
    page = (folder / 'page.html').read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page) and 'http' not in page and '@import' not in page
    assert len(re.findall('data:image/png;base64,', page)) == 1 and 'Its own input size is 64 x 96 pixels' in page
    data, = (json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page))
    assert data['size'] == [5, 7] and data['positions'] == [list(range(5)), list(range(7))] and data['start'] == [2, 3]
    assert len(data['panels']) == 3
    model, inputs = model_and_input(folder, 'test_ppma')
    expected = subquad.influence(model, inputs, (20, 70))['stages.2.blocks.1']
    assert expected.token == (1, 4)
    frame, shown = 1 * 7 + 4, data['panels'][2]
    low, _, high = shown['limits'][frame]
    levels = torch.tensor(list(base64.b64decode(shown['levels']))).reshape(35, 5, 7)[frame] / 255
    assert torch.allclose(low + levels * (high - low), expected.weights[0].mean(0).clamp(max=high), atol=high / 250)
    assert len(base64.b64decode(shown['colors'])) == 3 * 256


@pytest.mark.skipif(bool(missing_programs('chromium', 'chromedriver')),
                    reason=missing_programs('chromium', 'chromedriver'))
def test_a_click_in_a_page_chooses_the_pixel(folder, tmp_path_factory):
    """In a browser, a click on a map and a slider move all crosses, and the maps are those of the pixel."""
    arguments = ['test_ppma.safetensors', 'images/1.png', '--out', 'page.html', '--layers', 'stages.2.blocks.1']
    assert visualize.main([*arguments, '--panels', 'mask']) == 0
    with served(folder) as address, browser(tmp_path_factory.mktemp('profile')) as page:
        page.open(f'{address}/page.html')
        shown = """const root = document.querySelector('.viewer'), canvas = root.querySelector('canvas');
            const pixels = canvas.getContext('2d').getImageData(0, 0, 7, 5).data, sums = [];
            for (let i = 0; i < 35; i++) sums.push(pixels[4 * i] + pixels[4 * i + 1] + pixels[4 * i + 2]);
            return [[...root.querySelectorAll('output')].map(out => out.textContent), sums.indexOf(Math.max(...sums)),
                    root.querySelectorAll('.cross')[1].style.left, root.querySelector('.ends').innerText.length > 4]"""
        assert page.run(shown) == [['2', '3'], 2 * 7 + 3, '50%', True]
        page.run("""const box = document.querySelector('canvas').getBoundingClientRect();
            document.querySelector('canvas').dispatchEvent(new MouseEvent('click', {bubbles: true,
                clientX: box.left + box.width * 5.5 / 7, clientY: box.top + box.height * 1.5 / 5}))""")
        assert page.run(shown)[:2] == [['1', '5'], 1 * 7 + 5]
        page.run("""const slider = document.querySelector('input'); slider.value = 4;
            slider.dispatchEvent(new Event('input'))""")
        assert page.run(shown)[:2] == [['4', '5'], 4 * 7 + 5]
        assert [line for line in page.log() if line['level'] == 'SEVERE' and 'favicon' not in line['message']] == []


@pytest.mark.parametrize('names', [['levels'], ['levels', 'edges']])
def test_a_page_of_charts_has_no_viewer(folder, paged, names):
    assert visualize.main(['test_myo.safetensors', 'images/1.png', '--panels', *names, '--out', 'page.html']) == 0
    assert paged[0] == []


def test_a_page_of_another_model(folder, capsys):
    assert visualize.main(['test_resnet.safetensors', 'images', '--out', 'page.html', '--max-images', '2']) == 0
    assert f'{len(list((folder / "images").iterdir())) - 2} of' in capsys.readouterr().out
    page = (folder / 'page.html').read_text()
    assert page.count('data:image/png;base64,') == 2 and 'viewer' not in page.split('</style>')[1]


def test_a_page_with_signed_maps():
    """One kind of scale for all frames: signed, with the middle at zero, if a frame has negative weights."""
    frames = [[panels.Panel('t', torch.tensor([[1.0, x]]), 'l', panels.scale_of_weights(torch.tensor([1.0, x])))]
              for x in (0.5, -2.0)]
    viewer = webpage.Viewer('layer', torch.zeros(2, 4, 3).numpy(), [0], [0, 1], (0, 0), frames)
    text = webpage._viewer(viewer)
    panel, = json.loads(re.search(r'application/json">(.*?)</script>', text)[1])['panels']
    assert panel['limits'] == [[-1, 0, 1], [-2, 0, 2]]
    assert list(base64.b64decode(panel['levels'])) == [255, 191, 191, 0]


def test_scales():
    def limits(values, scale):
        return panels.limits(panels.Panel('', torch.tensor(values), '', scale))

    assert limits([1.0, 3.0], 'range') == (1, 3, False) and limits([1.0, 3.0], 'positive') == (0, 3, False)
    assert limits([0.0, 1e-9, 1.0], 'decades') == (pytest.approx(1e-5), 1, True)
    assert limits([2.0, 2.0], 'range') == (1.98, 2.02, False) and limits([0.0, 0.0], 'decades') == (0, 1, False)
    assert panels.scale_of_weights(torch.tensor([0.0] * 500 + [1.0])) == 'decades'
    assert panels.ticks(1, 100, True)['labels'] == ['1', '10', '100']
    assert panels.ticks(0.9711, 0.9719, False)['labels'] == ['0.9711', '0.9715', '0.9719']
