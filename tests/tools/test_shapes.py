"""The generated data set: its formats agree with each other and with their readers; what a user has is never lost."""
import json
import os

import numpy as np
import pytest
from PIL import Image

from subquad.tools import make_dataset
from subquad.tools.common.cli import UserError
from subquad.tools.data import shapes, shapes_files
from subquad.tools.engine.config import load

OPTIONS = ['--train', '24', '--val', '22', '--size', '72x96']


def files(folder):
    """{relative path: bytes} of all files, hidden ones included."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data') / 'shapes'
    assert make_dataset.main(['shapes', str(folder), *OPTIONS]) == 0
    return folder


@pytest.fixture
def small(tmp_path):
    folder = tmp_path / 'data' / 'shapes'
    make_dataset.main(['shapes', str(folder), '--train', '2', '--val', '2', '--size', '48'])
    return folder


@pytest.mark.parametrize('part, count', [('train', 24), ('val', 22)])
def test_masks_boxes_areas_and_label_maps_agree(folder, part, count):
    coco = pytest.importorskip('pycocotools.coco').COCO(str(folder / 'annotations' / f'instances_{part}.json'))
    assert [(c['id'], c['name']) for c in coco.loadCats(coco.getCatIds())] == list(enumerate(shapes.CLASSES, 1))
    assert len(coco.imgs) == count and min(coco.anns) == 1
    empty = [image for image in coco.imgs if not coco.getAnnIds(imgIds=[image])]
    assert empty == [2, 22]
    seen = set()
    for number, image in coco.imgs.items():
        labels = Image.open(folder / 'annotations_seg' / part / image['file_name'].replace('.jpg', '.png'))
        picture = Image.open(folder / 'images' / part / image['file_name'])
        assert labels.mode == 'L' and picture.mode == 'RGB'
        assert labels.size == picture.size == (image['width'], image['height']) == (96, 72)
        labels, drawn = np.array(labels), np.zeros((72, 96), int)
        for annotation in coco.loadAnns(coco.getAnnIds(imgIds=[number])):
            mask = coco.annToMask(annotation).astype(bool)
            rows, columns = mask.nonzero()
            x, y, width, height = annotation['bbox']
            assert (x, y, x + width - 1, y + height - 1) == (columns.min(), rows.min(), columns.max(), rows.max())
            assert annotation['area'] == mask.sum() > 0 and annotation['iscrowd'] == 0
            assert (labels[mask] == annotation['category_id']).all()
            assert not drawn[mask].any()                # what is hidden belongs to the one in front
            drawn[mask] = annotation['category_id']
            seen.add(annotation['category_id'])
        assert (drawn == labels).all()
    assert seen == {1, 2, 3, 4, 5}


def test_masks_cover_the_drawn_shapes():
    rng = np.random.default_rng(0)
    background = rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)
    for _ in range(20):
        scene = shapes.draw_scene(rng, background, 6)
        changed = abs(scene.image.astype(int) - background).max(-1)
        assert scene.categories and (scene.owner.max() == len(scene.categories))
        # Of a shape's pixels only those at an edge are mixed with the background; elsewhere only a thin tip changes it.
        flat = [scene.image[scene.owner == n] for n in range(1, len(scene.categories) + 1)]
        assert all((pixels == np.median(pixels, 0).astype(np.uint8)).all(-1).mean() > 0.4 for pixels in flat)
        padded = np.pad(scene.owner, 1)
        near = np.max([padded[y:y + 128, x:x + 128] for y in range(3) for x in range(3)], 0)
        assert (changed[near == 0] > 0).mean() < 0.002


def test_no_shape_is_hardly_visible():
    """Later shapes, and the image's edge, leave the promised share of every shape."""
    rng = np.random.default_rng(1)
    kinds = [shapes.coverage(kind, 20, 0.3) >= 128 for kind in shapes.CLASSES]
    expected = [np.pi * 20 ** 2, np.pi * 20 ** 2 * (1 - shapes.HOLE ** 2), 3 * 3 ** 0.5 / 4 * 20 ** 2, 2 * 20 ** 2,
                10 * 0.5 * 20 ** 2 * shapes.NOTCH * np.sin(np.pi / 5)]
    for kind, area in zip(kinds, expected):
        assert kind.sum() == pytest.approx(area, rel=0.03)
    least = shapes.LEAST_VISIBLE * expected[1] * (64 * shapes.RADII[0] / 20) ** 2     # the smallest ring's
    for _ in range(40):
        scene = shapes.draw_scene(rng, np.full((64, 64, 3), 128, np.uint8), 30)
        counts = np.bincount(scene.owner.ravel(), minlength=len(scene.categories) + 1)[1:]
        assert len(counts) > 5 and counts.min() > 0.7 * least


def test_the_parts_share_no_background(folder):
    for name, file in shapes.photograph_files().items():
        with Image.open(file) as photograph:
            width = photograph.width
        index = list(shapes.PHOTOGRAPHS).index(name)
        widths = [shapes.backgrounds(part)[index].width for part in shapes.PARTS]
        assert sum(widths) == width and min(widths) > 100
    metadata = json.loads((folder / 'dataset.json').read_text(encoding='utf-8'))
    assert set(metadata['photographs']) == set(shapes.PHOTOGRAPHS) and metadata['labels']['star'] == 5


def test_the_same_seed_gives_the_same_bytes(folder, tmp_path, capsys):
    np.random.seed(5)
    state = np.random.get_state()[1].copy()
    make_dataset.main(['shapes', str(tmp_path / 'again'), *OPTIONS])
    assert files(tmp_path / 'again') == files(folder)
    assert (np.random.get_state()[1] == state).all()
    make_dataset.main(['shapes', str(tmp_path / 'other'), *OPTIONS, '--seed', '1'])
    image = 'images/train/000000.jpg'
    assert files(tmp_path / 'other')[image] != files(folder)[image]
    # A smaller one is the beginning of a larger one.
    make_dataset.main(['shapes', str(tmp_path / 'less'), *OPTIONS[:-4], '--val', '2', '--size', '72x96'])
    less = {k: v for k, v in files(tmp_path / 'less').items() if k.endswith(('.jpg', '.png'))}
    assert less.items() <= files(folder).items()
    assert {path.name for path in tmp_path.iterdir()} == {'again', 'other', 'less'}         # no temporary folders


def test_existing_data_sets_are_kept(small, capsys):
    before, times = files(small), os.stat(small / 'dataset.json').st_mtime_ns
    same = ['shapes', str(small), '--train', '2', '--val', '2', '--size', '48x48']
    capsys.readouterr()
    assert make_dataset.main(same) == 0
    assert 'already' in capsys.readouterr().out and os.stat(small / 'dataset.json').st_mtime_ns == times
    with pytest.raises(UserError, match='size 48x48, not 64x64; seed 0, not 7.*--force'):
        make_dataset.main([*same[:-1], '64', '--seed', '7'])
    assert files(small) == before
    (small / 'notes.txt').write_text('mine')
    with pytest.raises(UserError, match='notes.txt'):
        make_dataset.main([*same, '--force'])
    (small / 'notes.txt').unlink()
    assert files(small) == before
    (small / 'images' / 'val' / '000001.jpg').unlink()
    with pytest.raises(UserError, match='lacks.*images/val/000001.jpg.*--force'):
        make_dataset.main(same)
    assert make_dataset.main([*same, '--force']) == 0 and files(small) == before
    make_dataset.main([*same, '--force', '--seed', '7'])
    assert files(small) != before and [p.name for p in small.parent.iterdir()] == ['shapes']


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / 'mine' / 'images').mkdir(parents=True)
    (tmp_path / 'mine' / 'images' / 'a.jpg').write_bytes(b'precious')
    (tmp_path / 'odd').mkdir()
    (tmp_path / 'odd' / 'dataset.json').write_text('{"dataset": "shapes", "options": {"train": "many", "val": 1}}')
    (tmp_path / 'folders' / 'in' / 'it').mkdir(parents=True)
    (tmp_path / 'file').write_text('precious')
    before = files(tmp_path)
    for options in ([], ['--force']):
        for name in ('mine', 'odd', 'folders'):
            with pytest.raises(UserError, match='holds other files'):
                make_dataset.main(['shapes', str(tmp_path / name), *OPTIONS, *options])
        with pytest.raises(UserError, match='is a file'):
            make_dataset.main(['shapes', str(tmp_path / 'file'), *OPTIONS, *options])
        with pytest.raises(UserError, match='cannot (read|write)'):
            make_dataset.main(['shapes', str(tmp_path / 'file' / 'below'), *OPTIONS, *options])
    assert files(tmp_path) == before and (tmp_path / 'folders' / 'in' / 'it').is_dir()
    (tmp_path / 'empty').mkdir()
    assert make_dataset.main(['shapes', str(tmp_path / 'empty'), '--train', '1', '--val', '1', '--size', '48']) == 0


@pytest.mark.parametrize('error, raised', [(OSError(28, 'No space left on device'), UserError),
                                           (KeyboardInterrupt(), KeyboardInterrupt)])
def test_an_interruption_leaves_what_was_there(small, monkeypatch, error, raised):
    before = files(small)
    write, done = shapes_files.write_part, []

    def stop(folder, part, options):
        if part == 'val':
            done.append(sorted(p.name for p in folder.iterdir()))
            raise error
        return write(folder, part, options)
    monkeypatch.setattr(shapes_files, 'write_part', stop)
    with pytest.raises(raised):
        make_dataset.main(['shapes', str(small), '--train', '2', '--val', '3', '--size', '48', '--force'])
    assert done == [['annotations', 'annotations_seg', 'images']]
    assert files(small) == before and [p.name for p in small.parent.iterdir()] == ['shapes']


@pytest.mark.parametrize('arguments, message', [
    (['shapes', '--train', '0'], '--train must be from 1'), (['shapes', '--val', '-3'], '--val must be from 1'),
    (['shapes', '--train', '100001'], '--train.*100000'), (['shapes', '--seed', '-1'], '--seed must be at least 0'),
    *((['shapes', '--size', size], '--size must be') for size in ('0', '47', '64x', '64x64x3', '2048', '64x20', 'no'))])
def test_wrong_arguments(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        make_dataset.main(arguments)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.PHOTOGRAPHS, 'gone', ('skimage', 'data/gone.png', 'nobody'))
    with pytest.raises(UserError, match='scikit-image.*gone.png.*pip install'):
        make_dataset.main(['shapes', str(tmp_path / 'shapes'), *OPTIONS])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', ['mask-rcnn_test-ppma_shapes', 'upernet_test-ppma_shapes'])
def test_mmdet_and_mmseg_read_the_data_set(folder, monkeypatch, name):
    """Through the datasets and pipelines of the configs."""
    pytest.importorskip('mmcv')
    library = pytest.importorskip('mmdet' if 'rcnn' in name else 'mmseg')
    pytest.importorskip(f'{library.__name__}.datasets')
    from mmengine.registry import DATASETS, init_default_scope
    monkeypatch.chdir(folder.parent)
    config = load(name, {f'{part}_dataloader.dataset.data_root': 'shapes/' for part in shapes.PARTS})
    init_default_scope(config.default_scope)
    for part, count in (('train', 24), ('val', 22)):
        instances = json.loads((folder / 'annotations' / f'instances_{part}.json').read_text())['annotations']
        dataset = DATASETS.build(config[f'{part}_dataloader'].dataset)
        assert len(dataset) == count
        sample = dataset[0]
        assert sample['inputs'].shape == (3, 72, 96)
        first = [a for a in instances if a['image_id'] == 1]
        if 'rcnn' in name:
            raw = dataset.get_data_info(0)['instances']
            assert [i['bbox_label'] + 1 for i in raw] == [a['category_id'] for a in first]
            if part == 'train':
                truth = sample['data_samples'].gt_instances
                assert truth.masks.masks.sum((1, 2)).tolist() == [a['area'] for a in first]
                boxes = truth.bboxes.tensor
                assert ((boxes[:, 2:] - boxes[:, :2]).prod(1).tolist() == [a['bbox'][2] * a['bbox'][3] for a in first])
        else:
            labels = sample['data_samples'].gt_sem_seg.data
            areas = {n: sum(a['area'] for a in first if a['category_id'] == n) for n in range(1, 6)}
            assert {n: int((labels == n).sum()) for n in range(1, 6)} == areas
