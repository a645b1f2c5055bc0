"""Images in the pipelines of detectors and segmenters: read as the classifiers' are, and damage stops nothing."""
import json
import os

import numpy as np
import pytest
import torch
from pairwise import slow
from PIL import Image

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from mmengine.dataset import Compose
from mmengine.registry import MODELS, init_default_scope

from subquad.backbones.weights import save_state_dict
from subquad.tools import make_dataset, predict, train
from subquad.tools.common import cli, images
from subquad.tools.common.cli import UserError
from subquad.tools.common.images import UnreadableImage, open_image
from subquad.tools.engine.config import find, known_configs, load
from subquad.tools.engine.dense.photographs import LoadPhotograph, pixels, with_photographs
from subquad.tools.engine.dense.prediction import Predictor
from subquad.tools.engine.dense.task import metadata
from subquad.tools.engine.training.runner import build_runner

MASK_RCNN, UPERNET = 'mask-rcnn_test-ppma_shapes', 'upernet_test-ppma_shapes'
DENSE = [name for name in known_configs() if find(name).parent.name in ('detection', 'segmentation')]


@pytest.fixture
def data(tmp_path):
    """6 images to train on, 3 to test on."""
    make_dataset.main(['shapes', str(tmp_path / 'shapes'), '--train', '6', '--val', '3', '--size', '96'])
    return tmp_path / 'shapes'


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
    """{config: weights of a network that has not been trained}."""
    folder, found = tmp_path_factory.mktemp('weights'), {}
    for name in (MASK_RCNN, UPERNET):
        config = load(name)
        init_default_scope(config.default_scope)
        torch.manual_seed(0)
        found[name] = str(folder / f'{name}.safetensors')
        save_state_dict(MODELS.build(config.model).state_dict(), found[name], metadata(config))
    return found


def _loaded(path, **options):
    return LoadPhotograph(**options)(dict(img_path=str(path)))['img']


def _damage(file):
    whole = file.read_bytes()
    file.write_bytes(whole[:len(whole) // 2])


def test_ordinary_images_load_as_in_mmcv(data, tmp_path):
    """Bit for bit: published checkpoints see the pixels that they were trained on."""
    from mmcv.transforms import LoadImageFromFile
    image = Image.open(next((data / 'images' / 'val').iterdir())).convert('RGB')
    for name, options in (('a.jpg', dict(quality=75)), ('b.jpg', dict(quality=95, subsampling=0)), ('c.png', {})):
        image.save(tmp_path / name, **options)
        for kwargs in ({}, dict(to_float32=True)):
            theirs = LoadImageFromFile(**kwargs)(dict(img_path=str(tmp_path / name)))
            ours = LoadPhotograph(**kwargs)(dict(img_path=str(tmp_path / name)))
            assert ours['img'].dtype == theirs['img'].dtype and (ours['img'] == theirs['img']).all()
            assert ours['img_shape'] == theirs['img_shape'] and ours['ori_shape'] == theirs['ori_shape']


@pytest.mark.parametrize('ending', ['jpg', 'tif'])
def test_orientation(ending, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new('RGB', (40, 24), (250, 0, 0)).save(tmp_path / f'a.{ending}', exif=exif)
    assert _loaded(tmp_path / f'a.{ending}').shape == (40, 24, 3)
    assert _loaded(tmp_path / f'a.{ending}')[20, 12].tolist()[2] > 240                     # BGR
    if ending != 'tif':
        assert _loaded(tmp_path / f'a.{ending}', color_type='color_ignore_orientation').shape == (24, 40, 3)
        assert pixels(tmp_path / f'a.{ending}', (24, 40)).shape == (24, 40, 3)             # drawn as it was seen
    assert pixels(tmp_path / f'a.{ending}', (40, 24)).shape == (40, 24, 3)


def test_annotations_of_the_unrotated_image_are_noticed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(images, '_noted', images._Reported())
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.new('RGB', (40, 24)).save(tmp_path / 'a.jpg', exif=exif)
    for width, height, color_type, noted in (
            (40, 24, 'color_ignore_orientation', False), (24, 40, 'color', False), (41, 24, 'color', False),
            (40, 24, 'color', True), (40, 24, 'color', False)):
        LoadPhotograph(color_type=color_type)(dict(img_path=str(tmp_path / 'a.jpg'), height=height, width=width))
        assert ('a.jpg is 40 x 24 in its annotations' in capsys.readouterr().err) is noted


def _steps(value):
    """All transforms that a config names."""
    if isinstance(value, dict):
        yield from [value] if 'type' in value else []
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _steps(item)


@pytest.mark.parametrize('name', [*DENSE[::12], *slow(*(name for n, name in enumerate(DENSE) if n % 12))])
def test_every_config_reads_images_with_the_loader(name):
    config = load(name).to_dict()
    for part in ('train_dataloader', 'val_dataloader', 'test_dataloader', 'tta_pipeline'):
        if part in config:
            before = [step['type'] for step in _steps(config[part])]
            after = [step['type'] for step in _steps(with_photographs(config[part], 'replace'))]
            assert 'LoadImageFromFile' in before
            assert after == ['LoadPhotograph' if kind == 'LoadImageFromFile' else kind for kind in before]
            assert before == [step['type'] for step in _steps(config[part])]             # a copy


def test_other_loaders_are_not_replaced():
    for step in (dict(type='LoadImageFromFile', backend_args=dict(backend='petrel')),
                 dict(type='LoadImageFromFile', backend_args=dict(backend='local', path_mapping={'a': 's3://b'})),
                 dict(type='LoadImageFromFile', color_type='grayscale'),
                 dict(type='LoadImageFromFile', color_type='unchanged'), dict(type='LoadAnnotations')):
        assert with_photographs([step], 'raise') == [step]
    ours = with_photographs([dict(type='mmdet.LoadImageFromFile', backend_args=None, to_float32=True)], 'blank')
    assert ours == [dict(type='LoadPhotograph', backend_args=None, to_float32=True, unreadable='blank')]


@pytest.mark.parametrize('name', [pytest.param(MASK_RCNN, marks=pytest.mark.slow), UPERNET])
def test_training_goes_on(name, data, tmp_path, capfd):
    """One of six images is cut off, and one of three to validate with is no image."""
    train_images, val_images = (sorted((data / 'images' / part).iterdir()) for part in ('train', 'val'))
    _damage(train_images[2])
    val_images[1].write_text('no image')
    arguments = [name, '--data', str(data), '--work-dir', str(tmp_path / 'w'), '--epochs', '1', '--cfg-options',
                 'train_dataloader.batch_size=3', 'train_dataloader.num_workers=1', 'val_dataloader.num_workers=0']
    assert train.main(arguments) == 0
    errors = capfd.readouterr().err
    assert errors.count(f'{train_images[2]} is not an image') == 1 and 'another image is used instead' in errors
    assert errors.count(f'{val_images[1]} is not an image') == 1 and 'it counts as a black image' in errors
    assert '2 images could not be read' in errors
    written = next((tmp_path / 'w').glob('*.py')).read_text()            # for the libraries' own tools
    assert 'LoadImageFromFile' in written and 'LoadPhotograph' not in written


def test_an_image_that_the_pipeline_refuses_is_not_called_unreadable(tmp_path):
    """A side of half a pixel after resizing, for example."""
    Image.new('RGB', (900, 2)).save(tmp_path / 'thin.png')
    predictor = object.__new__(Predictor)
    predictor.pipeline = Compose(with_photographs([dict(type='LoadImageFromFile'), dict(
        type='Resize', scale=(100, 100), keep_ratio=True)], 'raise'))
    with pytest.raises(UnreadableImage, match='thin.png cannot be prepared: .*resize') as caught:
        predictor(tmp_path / 'thin.png')
    assert 'not an image' not in str(caught.value)


def test_replacement_images_depend_on_the_seed(data):
    """The same seed gives the same batch."""
    _damage(sorted((data / 'images' / 'train').iterdir())[2])
    from mmengine.registry import DATASETS
    config = load(UPERNET)
    init_default_scope(config.default_scope)
    dataset = with_photographs(config.train_dataloader.dataset.to_dict(), 'replace')
    built = DATASETS.build({**dataset, 'data_root': str(data)})
    seen = []
    for _ in range(2):
        np.random.seed(3)
        torch.manual_seed(3)
        seen.append(built[2]['inputs'])
    assert (seen[0] == seen[1]).all()


@pytest.mark.parametrize('unreadable', ['replace', 'blank'])
def test_missing_files_are_errors(unreadable, tmp_path):
    """They mean a wrong folder."""
    with pytest.raises(UnreadableImage, match=r'a.jpg is not an image that can be read \(No such file'):
        LoadPhotograph(unreadable=unreadable)(dict(img_path=str(tmp_path / 'a.jpg'), height=3, width=4))


@pytest.mark.parametrize('size, expected', [(dict(height=30, width=50), (30, 50)), ({}, None)])
def test_blank_images(size, expected, tmp_path):
    (tmp_path / 'a.jpg').write_text('no image')
    step = LoadPhotograph(unreadable='blank')
    if expected is None:
        with pytest.raises(UnreadableImage, match='a.jpg is not an image'):
            step(dict(img_path=str(tmp_path / 'a.jpg'), seg_map_path=None))
        Image.new('L', (7, 5)).save(tmp_path / 'labels.png')
        size, expected = dict(seg_map_path=str(tmp_path / 'labels.png')), (5, 7)
    results = step(dict(img_path=str(tmp_path / 'a.jpg'), **size))
    assert results['img'].shape == (*expected, 3) and not results['img'].any() and results['ori_shape'] == expected


@pytest.mark.parametrize('name', [MASK_RCNN, UPERNET])
def test_predict(name, checkpoints, data, tmp_path, capsys):
    """Damaged images are left out, rotated ones are rotated, names may be anything."""
    folder = tmp_path / 'photographs'
    folder.mkdir()
    image = open_image(sorted((data / 'images' / 'val').iterdir())[0])
    exif = Image.Exif()
    exif[0x0112] = 6
    names = ['[red]x.png', 'a b.png', os.fsdecode(b'\xff.png'), 'rotated.webp']
    for file in names:
        image.crop((0, 0, 96, 64)).save(folder / file, exif=exif if file.startswith('rotated') else None)
    (folder / 'bad.jpg').write_text('no image')
    image.save(folder / 'cut.jpg')
    _damage(folder / 'cut.jpg')
    out = tmp_path / 'out'
    with pytest.raises(SystemExit) as caught:
        cli.run(predict.main, [name, checkpoints[name], str(folder), '--out', str(out), '--json', '--score', '0.9'])
    output = capsys.readouterr()
    assert caught.value.code == 1 and '2 of 6 images could not be read and are left out' in output.err
    rows = json.loads(output.out)
    assert rows == json.loads((out / 'predictions.json').read_text())
    assert sorted(os.path.basename(row['file']) for row in rows) == sorted(names)
    for row in rows:
        upright = (96, 64) if 'rotated' in row['file'] else (64, 96)
        assert (row['height'], row['width']) == upright and os.path.exists(row['file'])
        assert Image.open(row['picture']).size[1] >= upright[0]
    with pytest.raises(UserError, match='bad.jpg is not an image'):
        predict.main([name, checkpoints[name], str(folder / 'bad.jpg'), '--out', str(out)])
    with pytest.raises(UserError, match='is not an image'):
        predict.main([name, checkpoints[name], str(folder), '--out', str(out), '--strict'])


def test_pictures_of_show_dir_are_upright(checkpoints, data, tmp_path):
    from subquad.tools.engine.dense.evaluation import evaluate
    config = load(UPERNET, {'test_dataloader.num_workers': 0})
    config.merge_from_dict({f'{part}_dataloader.dataset.data_root': str(data) for part in ('train', 'val', 'test')})
    sorted((data / 'images' / 'val').iterdir())[0].write_text('no image')
    metrics = evaluate(config, checkpoints[UPERNET], str(tmp_path / 'pictures'))
    assert 'mIoU' in metrics and len(list((tmp_path / 'pictures').iterdir())) == 3
    assert build_runner(config, str(tmp_path / 'w'), training=False).cfg.test_dataloader.dataset.pipeline[0].type == (
        'LoadImageFromFile')
