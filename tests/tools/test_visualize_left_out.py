"""subquad visualize: which images, layers and panels are left out, and what is refused."""
import re
from pathlib import Path

import pytest
from PIL import Image

from subquad.tools import visualize
from subquad.tools.common.cli import UserError
from subquad.tools.engine.drawing import image_sizes


def test_sizes_of_images(folder, capsys):
    """Images at least as large as the model's input keep their size; --max-side reduces them with a note."""
    from timm.data import create_transform

    from subquad.tools.common.images import LeftOut
    transform = create_transform((3, 64, 96), crop_pct=1.0)
    Image.new('RGB', (90, 200)).save('narrow.png')
    Image.new('RGB', (300, 150)).save('wide.png')

    def sizes(own_size=None, max_side=640):
        files = [Path(name) for name in ('images/0.png', 'narrow.png', 'wide.png')]
        found = image_sizes.load_photographs(files, transform, LeftOut(3), own_size, max_side)
        return [tuple(x.shape[1:]) for _, x in found]

    assert sizes() == [(70, 100), (64, 96), (150, 300)] and sizes(False) == [(64, 96)] * 3
    assert sizes(True, 128) == [(70, 100), (128, 58), (64, 128)]
    assert 'wide.png is reduced from 150 x 300 to 64 x 128 pixels (--max-side 128)' in capsys.readouterr().err


def test_panoramas_keep_32_pixels(folder, drawn, capsys):
    """A long image does not stop the picture: no side is reduced below 32, and one that is too long is left out."""
    Image.new('RGB', (1200, 66)).save('wide.png')
    Image.new('RGB', (33, 1200)).save('tall.png')
    Image.new('RGB', (20000, 40)).save('endless.png')
    images = ['images/0.png', 'wide.png', 'tall.png', 'endless.png']
    assert visualize.main(['test_ppma.safetensors', *images, '--own-size', '--panels', 'mask']) == 1
    assert [picture.image.shape[:2] for picture in drawn[:-1]] == [(70, 100), (35, 640), (1164, 32)]
    captured = capsys.readouterr()
    assert '3 image(s)' in captured.out and 'endless.png, 40 x 20000 pixels, is too long: no side is' in captured.err
    assert 'tall.png is reduced from 1200 x 33 to 1164 x 32 pixels (--max-side 640, because no side is reduced below ' \
        in captured.err
    drawn.clear()
    Image.new('RGB', (80, 64)).save('small.png')
    assert visualize.main(['test_ppma.safetensors', 'small.png', '--own-size', '--max-side', '32']) == 0
    assert drawn[0].image.shape[:2] == (32, 40)


def test_an_image_that_the_model_does_not_take_is_left_out(folder, drawn, capsys):
    Image.new('RGB', (80, 20)).save('low.png')
    arguments = ['test_ppma.safetensors', 'low.png']
    message = r'low.png cannot be drawn: PPMA: the input must be .* with H and W >= 32, got \(1, 3, 20, 80\)'
    assert visualize.main([*arguments, 'images/0.png', 'images/1.png', '--own-size']) == 1
    captured = capsys.readouterr()
    assert [picture.name for picture in drawn[:-1]] == ['0', '1'] and '2 image(s)' in captured.out
    assert re.fullmatch(f'left out: {message}', captured.err.strip())
    for extra in ([], ['images/0.png', '--strict']):
        with pytest.raises(UserError, match=message):
            visualize.main([*arguments, *extra, '--own-size'])


def test_notes_are_printed_once(folder, paged, capsys):
    """One line for a panel and a reason, however many images, layers and positions of the pixel there are."""
    arguments = ['hybrid.safetensors', 'images/0.png', 'images/1.png', '--out', 'page.html']
    assert visualize.main([*arguments, '--layers', 'stages.2', 'stages.3']) == 0
    layers = 'stages.2.blocks.1, stages.3.blocks.0'
    assert capsys.readouterr().err.splitlines() == [
        *(f"left out the panel {name} of {layers}: paths='none': the attention does not decay with distance"
          for name in ('horizontal-decay', 'vertical-decay')),
        f"left out the panel mask of {layers}: paths='none' has no polyline mask"]
    viewers, _ = paged
    assert [{len(frame) for frame in viewer.frames} for viewer in viewers] == [{3}, {2}, {2}] * 2


def test_named_panels_of_some_layers(folder, drawn, capsys):
    """Layers that have a named panel are drawn, also if the last layer of their map size does not have it."""
    for options, rows in ((['mask'], ['stages.2.blocks.0']), (['mask', '--layers', 'stages'], ['stages.2.blocks.0']),
                          (['mask', 'attention'], ['stages.0.blocks.0', 'stages.1.blocks.0', 'stages.2.blocks.0',
                                                   'stages.2.blocks.1', 'stages.3.blocks.0'])):
        drawn.clear()
        assert visualize.main(['hybrid.safetensors', 'images/1.png', '--panels', *options]) == 0
        assert [row.label.split('\n')[0] for row in drawn[0].rows] == rows
        captured = capsys.readouterr()
        assert captured.err.startswith('left out the panel mask of stages.0.blocks.0, stages.1.blocks.0, stages.2.')
        assert len(captured.err.splitlines()) == 1 and f'{len(rows)} layer(s), mask' in captured.out
    with pytest.raises(UserError, match="--panels mask: paths='none' has no polyline mask"):
        visualize.main(['hybrid.safetensors', 'images/1.png', '--panels', 'mask', '--layers', 'stages.1'])


@pytest.mark.parametrize('name, reason', [
    ('coat_lite_tiny', "CoaT does not call its layer 'serial_blocks4'"),
    ('pit_ti_224', "the output of 'transformers.2', a tuple, is not one map of features")])
def test_models_without_class_activation(folder, drawn, capsys, name, reason):
    assert visualize.main([name, 'images/1.png', '--random']) == 0
    panel, = drawn[0].rows[0].panels
    assert panel.title.startswith('effective receptive field') and float(panel.values.max()) > 0
    captured = capsys.readouterr()
    assert f'left out the panel activation: {reason}' in captured.err and captured.out.startswith('drew')
    assert '0 layer(s), receptive-field\n' in captured.out
    with pytest.raises(UserError, match=f'--panels activation: {reason}'):
        visualize.main([name, 'images/1.png', '--random', '--panels', 'activation'])


@pytest.mark.parametrize('arguments, message', [
    (['test_ppma.safetensors', 'images', '--no-own-size', '--max-side', '40'],
     '--max-side has no effect with --no-own-size'),
    (['test_vit', 'images', '--random', '--max-side', '40'],
     '--max-side has no effect: VisionTransformer takes images of its input size only'),
    (['test_myo.safetensors', 'images', '--at', '1', '0'], '^--at must be two fractions of height and width'),
    (['test_mobilevitv2.safetensors', 'images', '--heads'], '--heads has no effect on the panels context'),
    (['test_lcsm.safetensors', 'images', '--at', '0', '0'], '--at has no effect on the panels decay, length, heads'),
    (['test_ppma.safetensors', 'images', '--panels', 'activation', '--layers', 'stages'], '--layers has no effect on'),
    (['test_ppma.safetensors', 'images', '--target', 'a'], '--target is for --panels activation'),
    (['test_ppma', 'images', '--random', '--model', 'test_myo'], '--model is for a checkpoint'),
    (['test_ppma.safetensors', 'images', '--layers', 'stages.7'], '--layers stages.7: no such layer'),
    (['plain.safetensors', 'images', '--panels', 'mask'], "paths='none' has no polyline mask"),
    (['plain.safetensors', 'images', '--panels', 'vertical-decay'], "paths='none': the attention does not decay"),
    (['test_mobilevitv2.safetensors', 'images', '--max-images', '0'], '--max-images must be at least 1, got 0'),
    (['test_mobilevitv2.safetensors', 'images', '--max-side', '8'], '--max-side must be at least 32, got 8'),
    (['test_mobilevitv2.safetensors', 'images', '--dpi', '601'], '--dpi must be at most 600, got 601'),
    (['test_mobilevitv2.safetensors', 'nothing'], 'no file or folder'),
    (['test_myo.safetensors', 'images', '--at', '1', '0'], 'at must be two fractions of height and width'),
    (['deltanet.safetensors', 'images'], 'LCSM has none of its usual panels; choose --panels influence'),
    (['deltanet.safetensors', 'images', '--panels', 'decay'], "mixer='deltanet' has no decay for each token"),
    (['retnet.safetensors', 'images', '--panels', 'length'], "mixer='retnet' decays alike at all tokens"),
    (['skew.safetensors', 'images', '--panels', 'deviation'], "parametrization='skew' has no standard deviation"),
    (['test_lcsm.safetensors', 'images', '--panels', 'masc'], '--panels masc: LCSM has no such panel; it has decay'),
    (['test_ppma.safetensors', 'images', '--panels', 'masc'], 'did you mean mask'),
    (['test_resnet.safetensors', 'images', '--panels', 'mask'], 'ResNet has no such panel; it has receptive-field'),
    (['test_resnet.safetensors', 'images', '--layers', 'layer1'], '--layers layer1: no such layer'),
    (['test_ppma.safetensors', 'images', '--panels', 'activation', '--target', 'd'], "no class 'd'; the model has 3"),
    (['test_ppma.safetensors', 'images', '--random'], 'Invalid pretrained tag'),
    (['test_pma', 'images', '--random'], "unknown model 'test_pma'"),
    (['lcsm_sequence', 'images', '--random'], 'takes tokens'),
    (['test_vit', 'images', '--random', '--own-size'], 'should be divisible by patch size'),
    (['nothing.safetensors', 'images'], 'no weight file at'),
    (['test_mobilevitv2.safetensors', 'test_ppma.safetensors'], 'is not an image that can be read'),
    (['test_mobilevitv2.safetensors', 'images', '--out', 'picture.txt'], '--out must end in .png, .jpg, .jpeg')])
def test_wrong_arguments(arguments, message, folder):
    before = set(folder.rglob('*'))
    with pytest.raises(UserError, match=message):
        visualize.main(arguments)
    assert set(folder.rglob('*')) == before
