"""Reading images: orientation, depths, transparency, damage, names; and what training and prediction make of them."""
import json
import os

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps

from subquad.backbones.weights import save_weights
from subquad.tools import predict, train, visualize
from subquad.tools.common import cli, images
from subquad.tools.common.cli import UserError, shown
from subquad.tools.common.images import UnreadableImage, open_image

ORIENTATION = 0x0112


@pytest.fixture
def photograph():
    """(24, 40, 3) uint8, smooth, without any symmetry."""
    y, x = np.mgrid[0:24, 0:40]
    return np.stack([x * 6, y * 10, (x + y) * 3], -1).astype(np.uint8)


@pytest.fixture
def ramp():
    """(24, 40) from 0 to 1."""
    return np.linspace(0, 1, 960).reshape(24, 40)


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model('test_ppma', num_classes=3)
    save_weights(model, tmp_path / 'w.safetensors', dict(
        model='test_ppma', options=dict(num_classes=3), classes=['[red]x[/blue]', 'b', 'c'],
        transform=dict(input_size=(3, 32, 32), crop_pct=1.0)))
    return str(tmp_path / 'w.safetensors')


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('ending', ['jpg', 'png', 'webp', 'tif'])
def test_exif_orientation(orientation, ending, photograph, tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / f'a.{ending}'
    Image.fromarray(photograph).save(path, exif=exif, **({'lossless': True} if ending == 'webp' else {}))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert('RGB'))
    found = np.asarray(open_image(path))
    assert found.shape == ((40, 24, 3) if orientation >= 5 else (24, 40, 3)) and (found == expected).all()
    if ending != 'tif':                                  # Pillow itself turns those
        stored = np.asarray(Image.open(path).convert('RGB'))
        assert (np.asarray(open_image(path, upright=False)) == stored).all()


def test_images_with_damaged_exif_are_read(photograph, tmp_path):
    Image.fromarray(photograph).save(tmp_path / 'a.jpg', exif=b'Exif\x00\x00II*\x00\xff\xff\xff\xff garbage')
    assert open_image(tmp_path / 'a.jpg').size == (40, 24)


@pytest.mark.parametrize('name, dtype, white', [
    ('a.png', np.uint16, 65535), ('a.tif', np.uint16, 65535),
    ('a.tif', np.int32, 255), ('b.tif', np.int32, 65535), ('c.tif', np.int32, 2_000_000_000),
    ('a.tif', np.float32, 1), ('b.tif', np.float32, 255), ('c.tif', np.float32, 1e6)])
def test_deep_images_are_scaled(name, dtype, white, ramp, tmp_path, capsys, monkeypatch):
    """0 is black, the largest number white, and intermediate values keep their order; nothing is clipped."""
    monkeypatch.setattr(images, '_noted', images._Reported())
    Image.fromarray((ramp * white).astype(dtype)).save(tmp_path / name)
    assert Image.open(tmp_path / name).mode[0] in 'IF'
    found = np.asarray(open_image(tmp_path / name)).astype(float)
    assert found.shape == (24, 40, 3) and abs(found - 255 * ramp[..., None]).max() <= 1.01
    note = capsys.readouterr().err
    assert ('note: ' in note and name in note) == (dtype is not np.uint16)
    open_image(tmp_path / name)
    assert not capsys.readouterr().err                     # once


def test_pixels_that_are_nan_or_infinite(tmp_path):
    values = np.full((4, 4), 0.5, np.float32)
    values[0] = np.nan, np.inf, -np.inf, 1
    Image.fromarray(values).save(tmp_path / 'a.tif')
    assert np.asarray(open_image(tmp_path / 'a.tif'))[..., 0][0].tolist() == [0, 255, 0, 255]
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(tmp_path / 'b.tif')
    with pytest.raises(UnreadableImage, match='b.tif holds no number but NaN'):
        open_image(tmp_path / 'b.tif')


def test_transparency_becomes_white(photograph, tmp_path, recwarn):
    """The colors hidden under it do not show; opaque pixels stay as they are."""
    alpha = np.full((24, 40), 255, np.uint8)
    alpha[:, :20] = 0
    rgba = Image.fromarray(np.dstack([photograph, alpha]))
    rgba.save(tmp_path / 'rgba.png')
    rgba.convert('LA').save(tmp_path / 'la.png')
    Image.fromarray(np.repeat(np.arange(2, dtype=np.uint8), 480).reshape(24, 40).T.copy().reshape(24, 40)).save(
        tmp_path / 'grey.png', transparency=0)
    palette = Image.fromarray(photograph).quantize(8)
    hidden = np.asarray(palette) == 3
    palette.save(tmp_path / 'p.png', transparency=3)
    palette.save(tmp_path / 'bytes.png', transparency=bytes([255, 255, 255, 0, 255, 255, 255, 255]))
    for name in ('rgba', 'la'):
        found = np.asarray(open_image(tmp_path / f'{name}.png'))
        expected = photograph if name == 'rgba' else np.asarray(rgba.convert('L').convert('RGB'))
        assert (found[:, :20] == 255).all() and (found[:, 20:] == expected[:, 20:]).all()
    for name in ('p', 'bytes'):
        found = np.asarray(open_image(tmp_path / f'{name}.png'))
        assert hidden.any() and (found[hidden] == 255).all()
        assert (found[~hidden] == np.asarray(palette.convert('RGB'))[~hidden]).all()
    assert set(np.unique(np.asarray(open_image(tmp_path / 'grey.png')))) == {1, 255}
    assert not [w for w in recwarn if 'ransparency' in str(w.message)]


def test_other_modes(photograph, tmp_path):
    image = Image.fromarray(photograph)
    image.convert('CMYK').save(tmp_path / 'cmyk.jpg', quality=98)
    assert abs(np.asarray(open_image(tmp_path / 'cmyk.jpg')).astype(int) - photograph).mean() < 4
    image.convert('1').save(tmp_path / 'one.png')
    assert set(np.unique(np.asarray(open_image(tmp_path / 'one.png')))) == {0, 255}
    image.convert('L').save(tmp_path / 'l.png')
    assert (np.asarray(open_image(tmp_path / 'l.png'))[..., 1] == np.asarray(image.convert('L'))).all()


@pytest.fixture
def mixed(photograph, tmp_path):
    """A folder of images, two of which cannot be read."""
    folder = tmp_path / 'mixed'
    folder.mkdir()
    for n in range(4):
        Image.fromarray(photograph).resize((60, 50)).save(folder / f'{n}.jpg')
    whole = (folder / '1.jpg').read_bytes()
    (folder / '1.jpg').write_bytes(whole[:len(whole) // 2])
    (folder / '2.jpg').write_text('no image')
    return folder


def _run(main, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.run(main, [str(argument) for argument in arguments])
    return caught.value.code


def test_predict_leaves_out_what_cannot_be_read(checkpoint, mixed, capsys):
    assert _run(predict.main, [checkpoint, mixed, '--json']) == 1
    output = capsys.readouterr()
    assert [os.path.basename(row['file']) for row in json.loads(output.out)] == ['0.jpg', '3.jpg']
    lines = output.err.strip().splitlines()
    assert len(lines) == 3 and '1.jpg is not an image that can be read (' in lines[0]
    assert '2.jpg is not an image' in lines[1]
    assert lines[2] == '2 of 4 images could not be read and are left out'
    assert _run(predict.main, [checkpoint, mixed, '--strict']) == 2
    assert capsys.readouterr().err.startswith('error: ')
    assert _run(predict.main, [checkpoint, mixed / '0.jpg']) == 0
    assert _run(predict.main, [checkpoint, mixed / '1.jpg', mixed / '2.jpg', '--json']) == 2
    output = capsys.readouterr()
    assert not output.out.count('{') and 'no image could be read (2 tried' in output.err


def test_unreadable_images_change_no_other_result(checkpoint, mixed, capsys):
    predict.main([checkpoint, str(mixed), '--json'])
    together = json.loads(capsys.readouterr().out)
    alone = []
    for name in ('0.jpg', '3.jpg'):
        predict.main([checkpoint, str(mixed / name), '--json'])
        alone += json.loads(capsys.readouterr().out)
    for one, other in zip(together, alone, strict=True):
        assert one['file'] == other['file']
        assert [c['probability'] for c in one['classes']] == pytest.approx([c['probability'] for c in other['classes']],
                                                                           abs=1e-5)


@pytest.mark.parametrize('arguments, message', [
    (['--score', '0.5'], '--score is for detectors and segmenters'), (['--out', 'x'], '--out is for detectors')])
def test_options_of_other_tasks_are_errors(arguments, message, checkpoint, mixed):
    with pytest.raises(UserError, match=message):
        predict.main([checkpoint, str(mixed), *arguments])


def test_visualize_leaves_out_what_cannot_be_read(checkpoint, mixed, tmp_path, capsys):
    pytest.importorskip('matplotlib')
    assert visualize.main([checkpoint, str(mixed), '--layers', 'stages.0', '--out', str(tmp_path / 'a.png')]) == 1
    assert '2 image(s)' in capsys.readouterr().out


def test_training_goes_on(photograph, tmp_path, capfd):
    """A file that is no image is left out; one that is cut off is replaced; each is named once in two epochs."""
    for part in ('train', 'val'):
        for label, name in enumerate(('dark', 'light')):
            (tmp_path / 'data' / part / name).mkdir(parents=True)
            for n in range(4):
                Image.fromarray(photograph // (2 - label)).save(tmp_path / 'data' / part / name / f'{n}.png')
    damaged = tmp_path / 'data' / 'train' / 'dark'
    (damaged / '0.png').write_text('no image')
    Image.fromarray(np.random.randint(0, 255, (99, 99, 3), dtype=np.uint8)).save(damaged / '2.png')
    whole = (damaged / '2.png').read_bytes()
    (damaged / '2.png').write_bytes(whole[:len(whole) // 2])
    arguments = ['ppma-tiny_folder', '--data', str(tmp_path / 'data'), '--model', 'test_ppma', '--epochs', '2',
                 '--work-dir', str(tmp_path / 'w'), '--cfg-options', 'train_dataloader.batch_size=4',
                 'train_dataloader.num_workers=1', 'val_dataloader.num_workers=0',
                 'train_dataloader.dataset.transform.input_size=(3,32,32)',
                 'val_dataloader.dataset.transform.input_size=(3,32,32)']
    assert train.main(arguments) == 0
    errors = capfd.readouterr().err
    assert errors.count(f'left out: {damaged / "0.png"} is not an image') == 1
    assert errors.count(f'{damaged / "2.png"} is not an image') == 1
    assert f'{damaged / "3.png"} is used instead' in errors
    assert '2 images could not be read' in errors


def test_damaged_image_is_replaced_by_the_next_of_its_class(photograph, tmp_path):
    from subquad.tools.data.image_sets import ImageFolder
    for label, name in enumerate('ab'):
        (tmp_path / name).mkdir()
        for n in range(3):
            Image.fromarray(photograph + np.uint8(3 * label + n)).save(tmp_path / name / f'{n}.png')
    whole = (tmp_path / 'a' / '2.png').read_bytes()
    data, strict = ImageFolder(str(tmp_path)), ImageFolder(str(tmp_path), strict=True)
    (tmp_path / 'a' / '2.png').write_bytes(whole[:-60])
    assert len(data) == 6 and [data[n]['label'] for n in range(6)] == [0, 0, 0, 1, 1, 1]
    assert (np.asarray(data[2]['inputs']) == np.asarray(data[0]['inputs'])).all()        # after the last the first
    with pytest.raises(UnreadableImage, match='2.png is not an image'):
        strict[2]
    for name in '01':
        (tmp_path / 'a' / f'{name}.png').write_bytes(b'')
    with pytest.raises(UnreadableImage, match='2.png is not an image'):
        data[2]
    with pytest.raises(UserError, match='0.png is not an image'):
        ImageFolder(str(tmp_path), strict=True)


def test_large_images(tmp_path, monkeypatch, recwarn):
    Image.new('L', (300, 200)).save(tmp_path / 'a.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 40_000)
    assert open_image(tmp_path / 'a.png').size == (300, 200) and not len(recwarn)      # Pillow only warns
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 20_000)
    with pytest.raises(UnreadableImage, match='a.png exceeds the limit of 40,000 pixels'):
        open_image(tmp_path / 'a.png')


ODD = ['photo [edited].png', '[red]x[/blue].png', 'back\\slash\\.png', 'new\nline.png', '\x1b[31m.png', '日本.png',
       os.fsdecode(b'not-utf8-\xff.png'), '$x$.png', "quo'te\".png", 'x' * 240 + '.png']


def test_odd_names(checkpoint, photograph, tmp_path, capsys):
    """JSON gives names that open the file again; the screen shows them whole, a line each, without markup."""
    folder = tmp_path / 'odd'
    folder.mkdir()
    for name in ODD:
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(photograph).save(folder / name)
    assert _run(predict.main, [checkpoint, folder, '--json']) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {os.path.relpath(row['file'], folder) for row in rows} == set(ODD)
    assert all(os.path.exists(row['file']) for row in rows)
    assert rows[0]['classes'][0]['name'] in ('[red]x[/blue]', 'b', 'c')
    assert _run(predict.main, [checkpoint, folder]) == 0
    table = capsys.readouterr().out
    for name in ODD:
        assert shown(name) in table, name
    assert '[red]x[/blue] (' in table and '\x1b' not in table and 'not-utf8-\\xff.png' in table
    assert len(table.splitlines()) == len(ODD) + 4
    assert shown('a\n\x1b[0mb') == 'a\\n\\x1b[0mb' and shown(ODD[0]) == ODD[0]
    if pytest.importorskip('matplotlib'):
        assert visualize.main([checkpoint, str(folder), '--max-images', '12', '--layers', 'stages.3',
                               '--out', str(tmp_path / 'a.png')]) == 0


@pytest.mark.parametrize('path', ['x' * 5000, 'a/' * 2500 + 'b.png', 'nul\0.png', '', 'x' * 300 + '.png'])
def test_impossible_paths(path, checkpoint, capsys):
    for arguments in ([checkpoint, path], [path, checkpoint] if path else [checkpoint, './nothing']):
        assert _run(predict.main, arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith('error: ') and error.count('\n') == 1 and len(error) < 1500
