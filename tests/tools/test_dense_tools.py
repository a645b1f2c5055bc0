"""Detectors and segmenters by the tools, ours and the libraries' own: train, resume, test, predict, two processes."""
import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from pairwise import slow
from pycocotools import mask as rle
from user_errors import command_error

from subquad.backbones.weights import read_checkpoint
from subquad.tools import make_dataset, predict, test, train
from subquad.tools.common.cli import UserError
from subquad.tools.engine.config import find, known_configs, load, scale_schedule
from subquad.tools.engine.training.runner import build_runner

MASK_RCNN, UPERNET = 'mask-rcnn_test-ppma_shapes', 'upernet_test-ppma_shapes'
SHORT = ['--cfg-options', 'randomness.seed=1']
pytestmark = pytest.mark.usefixtures('metafiles_read_once')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """16 images to train on, 4 to test on."""
    folder = tmp_path_factory.mktemp('dense') / 'shapes'
    make_dataset.main(['shapes', str(folder), '--train', '16', '--val', '4', '--size', '96'])
    for part in ('train', 'val'):                          # as VOC lists its images
        names = sorted(path.stem for path in (folder / 'images' / part).iterdir())
        (folder / f'{part}.txt').write_text('\n'.join(names))
    return folder


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):
    """{config: its work folder} after three epochs: the detector is resumed after two, the segmenter keeps them all."""
    folders = {name: tmp_path_factory.mktemp('runs') / name for name in (MASK_RCNN, UPERNET)}
    for name, *options in ((MASK_RCNN, '--epochs', '2'), (MASK_RCNN, '--epochs', '3', '--resume'),
                           (UPERNET, 'train_cfg.max_epochs=3', 'default_hooks.checkpoint.max_keep_ckpts=3')):
        assert train.main([name, '--data', str(data), '--work-dir', str(folders[name]), *SHORT, *options]) == 0
    return folders


@pytest.mark.parametrize('name, metrics', [(MASK_RCNN, ['coco/bbox_mAP_50', 'coco/segm_mAP_50']), (UPERNET, ['mIoU'])])
def test_train_resume_test(name, metrics, trained, data, tmp_path, capsys):
    folder = trained[name]
    assert {'last.safetensors', 'best.safetensors', 'epoch_3.pth'} <= set(os.listdir(folder))
    last, metadata, _ = read_checkpoint(folder / 'last.safetensors')
    state, _, source = read_checkpoint(folder / 'epoch_3.pth')         # no code runs, although a Runner wrote it
    assert source == 'state_dict' and metadata['epoch'] == 3 and metadata['config'] == name
    assert set(last) == set(state) and all(torch.equal(last[key], state[key]) for key in last)
    for file in ('last.safetensors', 'epoch_3.pth'):
        arguments = [name, str(folder / file), '--data', str(data), '--json']
        assert test.main([*arguments, '--show-dir', str(tmp_path / file)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert all(found[metric] >= 0 for metric in metrics)
        assert len(list((tmp_path / file).glob('*.png'))) == 4
        if file == 'last.safetensors':
            expected = found
    assert found == expected


def test_resumed_training_equals_an_uninterrupted_one(data, trained, tmp_path):
    shutil.copy(trained[UPERNET] / 'epoch_1.pth', tmp_path)      # what a run leaves that stops in its second epoch
    train.main([UPERNET, '--data', str(data), *SHORT, 'train_cfg.max_epochs=3', '--work-dir', str(tmp_path),
                '--resume', str(tmp_path / 'epoch_1.pth')])
    one, other = (read_checkpoint(folder / 'last.safetensors')[0] for folder in (trained[UPERNET], tmp_path))
    for key in one:
        torch.testing.assert_close(other[key], one[key], msg=key)


@pytest.mark.parametrize('name', [MASK_RCNN, UPERNET])
def test_predict(name, trained, data, tmp_path, capsys):
    images = data / 'images' / 'val'
    assert predict.main([name, str(trained[name] / 'last.safetensors'), str(images), '--out', str(tmp_path), '--json',
                         '--score', '0']) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == json.loads((tmp_path / 'predictions.json').read_text()) and len(rows) == 4
    for row in rows:
        assert Image.open(row['picture']).size == (384, 384), 'enlarged by 4, so that labels can be read'
        if name == UPERNET:
            masks = sum(rle.decode(item['mask']).astype(int) for item in row['classes'])
            assert (masks == 1).all(), 'each pixel has one class'
            assert sum(item['share'] for item in row['classes']) == pytest.approx(1, abs=1e-5)
        else:
            scores = [item['score'] for item in row['objects']]
            assert scores == sorted(scores, reverse=True) and scores
            for item in row['objects']:
                x1, y1, x2, y2 = item['box']
                assert 0 <= x1 <= x2 <= 96 and 0 <= y1 <= y2 <= 96 and rle.decode(item['mask']).shape == (96, 96)
                assert item['class'] in ('circle', 'ring', 'triangle', 'square', 'star')


def test_weights_hold_the_ema_average(data, tmp_path, capsys):
    """With EMAHook our files hold what validation saw and what the Runner's own hold."""
    config = tmp_path / 'averaged.py'
    config.write_text(f"_base_ = [{str(find(UPERNET))!r}]\ncustom_hooks = [dict(type='EMAHook', momentum=0.5)]\n"
                      "train_cfg = dict(max_epochs=2, val_interval=2)\n")
    work = tmp_path / 'work'
    train.main([str(config), '--data', str(data), '--work-dir', str(work)])
    reported = float(re.search(r'validation .*mIoU ([\d.]+)', capsys.readouterr().err)[1])
    kept = read_checkpoint(work / 'epoch_2.pth')[0]
    for name in ('best', 'last'):
        weights, metadata, _ = read_checkpoint(work / f'{name}.safetensors')
        assert all(torch.equal(weights[key], kept[key]) for key in weights), name
    test.main([str(config), str(work / 'best.safetensors'), '--data', str(data), '--json'])
    assert json.loads(capsys.readouterr().out)['mIoU'] == pytest.approx(reported, abs=0.02)
    # The config beside the weights is whole: it trains, tests and predicts.
    beside = work / 'averaged.py'
    test.main([str(beside), str(work / 'best.safetensors'), '--json', '--cfg-options', f'load_from={work}/none.pth'])
    assert json.loads(capsys.readouterr().out)['mIoU'] == pytest.approx(reported, abs=0.02), 'load_from is for training'


@pytest.mark.parametrize('name, epochs, expected', [
    ('mask-rcnn_ppma-t_fpn_1x_coco', 6, dict(milestones=[4, 6])), (UPERNET, 3, dict(T_max=3, end=3)),
    ('ssdlite_mobilevitv2-050_coco-320', 20, dict(T_max=20, end=20))])
def test_fewer_epochs_keep_the_schedules_shape(name, epochs, expected):
    config = load(name)
    warm_up = [s for s in load(name).param_scheduler if not s.by_epoch]
    scale_schedule(config, epochs)
    main = [s for s in config.param_scheduler if s.by_epoch][-1]
    assert {key: main[key] for key in expected} == expected and config.train_cfg.max_epochs == epochs
    assert [s for s in config.param_scheduler if not s.by_epoch] == warm_up


@pytest.mark.slow
def test_workers_draw_new_augmentations_in_each_epoch(data, tmp_path):
    options = [UPERNET, '--data', str(data), *SHORT, 'train_cfg.max_epochs=2', 'train_dataloader.num_workers=1',
               'train_dataloader.persistent_workers=True', 'default_hooks.checkpoint.max_keep_ckpts=2']
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    train.main([*options, '--work-dir', str(whole)])
    train.main([*options, '--work-dir', str(parts), '--resume', str(whole / 'epoch_1.pth')])
    one, other = (read_checkpoint(folder / 'last.safetensors')[0] for folder in (whole, parts))
    for key in one:
        torch.testing.assert_close(other[key], one[key], msg=key)


def test_mixed_precision_reaches_backbone_and_neck():
    from subquad.backbones.mm import CPUAmpOptimWrapper
    seen = []

    class Part(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(y.dtype)
            return (y,)

    model = torch.nn.Module()
    model.backbone, model.neck, model.head = Part(2, 2), Part(2, 2), torch.nn.Linear(2, 2)
    wrapper = CPUAmpOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), 1.), loss_scale='dynamic')
    with pytest.raises(ZeroDivisionError), wrapper.optim_context(model):
        y = model.neck(model.backbone(torch.ones(1, 2))[0])[0]
        assert seen == [torch.bfloat16] * 2 and y.dtype == model.head(y).dtype == torch.float32
        raise ZeroDivisionError
    assert model.backbone(torch.ones(1, 2))[0].dtype == torch.float32, 'the class\'s forward again, also after an error'


@pytest.mark.slow
def test_mixed_precision_on_a_cpu(data, tmp_path):
    assert train.main(['mask-rcnn_test-myo_shapes', '--amp', '--data', str(data), '--epochs', '1', '--work-dir',
                       str(tmp_path / 'amp'), *SHORT]) == 0
    weights, _, _ = read_checkpoint(tmp_path / 'amp' / 'last.safetensors')
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize('name', ['ssdlite_test-mobilevitv2_shapes', *slow('deeplabv3_test-mobilevitv2_shapes')])
def test_other_networks_train(name, data, tmp_path, capsys):
    work = tmp_path / 'run'
    assert train.main([name, '--data', str(data), '--epochs', '1', '--work-dir', str(work), *SHORT]) == 0
    assert test.main([name, str(work / 'last.safetensors'), '--data', str(data), '--json']) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])


def _run(command, **options):
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path)), 'OMP_NUM_THREADS': '1'}
    return subprocess.run([sys.executable, '-W', 'ignore', *map(str, command)], capture_output=True, text=True,
                          env=environment, **options)


@pytest.mark.slow
@pytest.mark.parametrize('library, name', [('mmdet', MASK_RCNN), ('mmseg', UPERNET)])
def test_tools_of_mmdet_and_mmseg_run_the_configs(library, name, data, tmp_path):
    """Their train.py and test.py, as installed, on our config unchanged, from another folder."""
    tools = Path(sys.modules[library].__path__[0]) / '.mim' / 'tools'
    # MMDetection imports MMPretrain if it is installed, and that torchvision, which may need subquad's repair.
    start = '-c', 'import runpy, subquad, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name="__main__")'
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'shapes').symlink_to(data)
    done = _run([*start, tools / 'train.py', find(name), '--work-dir', 'work',
                 '--cfg-options', 'train_cfg.max_epochs=1'],
                cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    checkpoint = tmp_path / 'work' / 'epoch_1.pth'
    done = _run([*start, tools / 'test.py', find(name), checkpoint, '--work-dir', 'tested'], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search('coco/bbox_mAP: |mIoU: ', done.stdout + done.stderr)
    # ... and a checkpoint of another network ends in an error, not in a test of random weights.
    done = _run([*start, tools / 'test.py', find(name), checkpoint, '--work-dir', 'tested',
                 '--cfg-options', 'model.backbone.arch=tiny'], cwd=tmp_path)
    assert done.returncode and 'not a checkpoint of this PPMA backbone' in done.stderr


@pytest.mark.slow
def test_two_processes(data, tmp_path):
    """torchrun on CPUs: one set of checkpoints, one result, that of one process."""
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '-m', 'subquad']
    work = tmp_path / 'work'
    done = _run([*torchrun, 'train', MASK_RCNN, '--data', data, '--epochs', '1', '--work-dir', work])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count('weights: ') == 1 and done.stderr.count('validation ') == 1
    assert sorted(path.name for path in work.glob('*.*t*')) == ['best.safetensors', 'epoch_1.pth', 'last.safetensors']
    done = _run([*torchrun, 'test', MASK_RCNN, work / 'last.safetensors', '--data', data, '--json'])
    assert done.returncode == 0, done.stderr[-2000:]
    two = json.loads(done.stdout)
    done = _run(['-m', 'subquad', 'test', MASK_RCNN, work / 'last.safetensors', '--data', data, '--json'])
    assert json.loads(done.stdout) == pytest.approx(two, abs=2e-3)


# ---- every config's data

def _pointed_at(dataset, folder, part):
    """The data set's config, reading the generated images."""
    dataset = copy.deepcopy(dataset)
    if 'datasets' in dataset:
        dataset['datasets'] = [_pointed_at(one, folder, part) for one in dataset['datasets']]
    elif 'dataset' in dataset:
        dataset['dataset'] = _pointed_at(dataset['dataset'], folder, part)
    elif 'Coco' in dataset['type']:
        dataset.update(data_root=str(folder), ann_file=f'annotations/instances_{part}.json',
                       data_prefix=dict(img=f'images/{part}/'), metainfo=dict(classes=('circle', 'star')))
    else:
        dataset.update(data_root=str(folder), ann_file=f'{part}.txt', img_suffix='.jpg', seg_map_suffix='.png',
                       data_prefix=dict(img_path=f'images/{part}', seg_map_path=f'annotations_seg/{part}'))
    return dataset


DENSE = [name for name in known_configs() if find(name).parent.name in ('detection', 'segmentation')]
ONE_A_SCHEDULE = {name.split('_', 2)[-1]: name for name in DENSE}.values()


@pytest.mark.parametrize('name', [*ONE_A_SCHEDULE, *slow(*(name for name in DENSE if name not in ONE_A_SCHEDULE))])
def test_every_configs_pipeline(name, data):
    from mmengine.registry import DATASETS, init_default_scope
    config = load(name)
    init_default_scope(config.default_scope)
    for part in ('train', 'val'):
        dataset = DATASETS.build(_pointed_at(config[f'{part}_dataloader'].dataset.to_dict(), data, part))
        item = dataset[1]
        assert item['inputs'].ndim == 3 and item['inputs'].shape[0] == 3
        if part == 'train' and config.default_scope == 'mmseg':
            assert item['data_samples'].gt_sem_seg.shape == item['inputs'].shape[1:]
        elif part == 'train':
            assert len(item['data_samples'].gt_instances.bboxes) == len(item['data_samples'].gt_instances.labels)


# ---- what a user can get wrong

def test_wrong_inputs_write_nothing(data, trained, tmp_path):
    folder = tmp_path / 'kept'
    folder.mkdir()
    (folder / 'mine.txt').write_text('mine')
    options = ['--data', data, '--work-dir', folder]
    for name, changes, message in (
            (MASK_RCNN, ['--cfg-options', 'train_dataloder.batch_size=1'],
             "'train_dataloder' is no entry .* did you mean train_dataloader"),
            (MASK_RCNN, ['--cfg-options', 'model.backbone.depth=3'], "model: .*unexpected keyword argument 'depth'"),
            (MASK_RCNN, ['--cfg-options', 'model.backbone.arch=huge'], "arch must be one of 'tiny'.* got 'huge'"),
            (MASK_RCNN, ['--cfg-options', 'model.roi_head.bbox_head.num_classes=4'],
             'model.roi_head.bbox_head.num_classes is 4, the data set has 5 classes'),
            (UPERNET, ['--cfg-options', 'model.decode_head.num_classes=5'], 'num_classes is 5, the data set has 6'),
            (MASK_RCNN, ['--model', 'ppma_tiny'], '--model is for classifiers'),
            (MASK_RCNN, ['--resume'], 'no checkpoint in'),
            (MASK_RCNN, ['--resume', trained[MASK_RCNN] / 'last.safetensors'], 'hold the state of training'),
            ('mask-rcnn_test-pmpa_shapes', [], "no config file 'mask-rcnn_test-pmpa_shapes'; did you mean")):
        command_error(train.main, [name, *options, *changes], match=message)
    command_error(train.main, [MASK_RCNN, '--data', tmp_path / 'nothing', '--work-dir', folder],
                  match='instances_train.json')
    command_error(train.main, [UPERNET, '--data', tmp_path / 'nothing', '--work-dir', folder],
                  match='No such file|no images found')
    assert os.listdir(folder) == ['mine.txt']
    last = trained[MASK_RCNN] / 'last.safetensors'
    command_error(test.main, ['mask-rcnn_test-myo_shapes', last, '--data', data],
                  match='is not a checkpoint of this MaskRCNN on Myo: .* keys missing')
    command_error(test.main, [UPERNET, last, '--data', data],
                  match='was trained on the classes circle, .* but the data has background, circle')
    command_error(test.main, [MASK_RCNN, tmp_path / 'none.pth', '--data', data], match='no weight file')
    command_error(test.main, [MASK_RCNN, last, '--data', data, '--tta'], match='no tta_model')
    command_error(predict.main, [MASK_RCNN, last], match='the following arguments|no images given')
    command_error(predict.main, [MASK_RCNN, last, data / 'dataset.json', '--out', tmp_path / 'out'],
                  match='is not an image')


def test_errors_keep_the_files_of_the_work_folder(data, trained, tmp_path):
    work = tmp_path / 'work'
    shutil.copytree(trained[UPERNET], work)
    (work / 'notes').mkdir()
    before = {path: path.read_bytes() if path.is_file() else None for path in work.rglob('*')}
    for changes, message in ((['optim_wrapper.optimizer.type=Nonsense'], 'optim_wrapper: '),
                             (['val_evaluator.type=Nonsense'], 'Nonsense'),
                             ([f'load_from={tmp_path / "none.pth"}'], 'no weight file')):
        with pytest.raises(Exception, match=message):              # a UserError, or the error of a library
            train.main([UPERNET, '--data', str(data), '--work-dir', str(work), '--cfg-options', *changes])
        assert {path: path.read_bytes() if path.is_file() else None for path in work.rglob('*')} == before
    torch.save({'state_dict': {}, 'x': print}, tmp_path / 'code.pth')
    for key in ('load_from', 'model.backbone.init_cfg.checkpoint'):
        changes = [f'{key}={tmp_path / "code.pth"}', 'model.backbone.init_cfg.type=Pretrained']
        if key == 'load_from':
            changes.pop()
        command_error(train.main, [UPERNET, '--data', data, '--work-dir', tmp_path / 'new', '--cfg-options', *changes],
                      match='could run code')
    command_error(train.main, [UPERNET, '--data', data, '--work-dir', work, '--resume', '--cfg-options',
                        'model.decode_head.channels=32'], match='is not a checkpoint of this EncoderDecoder: .*differ')
    assert not (tmp_path / 'new').exists()


def test_pictures_never_replace_images(data, trained, tmp_path):
    images = tmp_path / 'images'
    images.mkdir()
    for name in ('x.png', 'x-2.png'):
        Image.open(next((data / 'images' / 'val').iterdir())).save(images / name)
    last = trained[MASK_RCNN] / 'last.safetensors'
    command_error(predict.main, [MASK_RCNN, last, images, '--out', images], match='x-2.png is one of the images')
    command_error(test.main, [MASK_RCNN, last, '--data', data, '--show-dir', images], match='is not empty')
    from subquad.tools.engine.dense.prediction import PictureNames
    names = PictureNames()
    assert [names(Path(file)) for file in ('a/x.png', 'b/x.png', 'c/x-2.png')] == ['x.png', 'x-2.png', 'x-2-2.png']


def test_classes_of_a_file_and_labels_as_training_sees_them(data, tmp_path):
    from mmengine.registry import DATASETS, init_default_scope

    from subquad.tools.engine.dense.task import check_dataset, classes_of
    init_default_scope('mmseg')
    (tmp_path / 'classes.txt').write_text('sky\ntree\n')
    known = dict(type='BaseSegDataset', metainfo=dict(classes=str(tmp_path / 'classes.txt')))
    assert classes_of(known) == ['sky', 'tree']
    with pytest.raises(UserError, match='has no classes'):
        classes_of(dict(type='BaseSegDataset'))
    # ADE20K's zero is no class, and classes that are left out are none of the labels.
    config = load('upernet_ppma-t_8xb2-160k_ade20k-512x512')
    part = _pointed_at(config.train_dataloader.dataset.to_dict(), data, 'train')
    part['metainfo'] = dict(classes=('wall', 'building'))
    for head in (config.model.decode_head, config.model.auxiliary_head):
        head.num_classes = 2
    check_dataset(DATASETS.build(part), config, 'train')


def test_images_without_objects_and_single_images(data):
    """A batch of one image with nothing on it: losses are finite, and nothing is found where nothing is learned."""
    config = load(MASK_RCNN)
    config.merge_from_dict({'data_root': str(data)})
    for name in (MASK_RCNN, 'mask-rcnn_test-myo_shapes', 'mask-rcnn_test-lcsm_shapes',
                 'ssdlite_test-mobilevitv2_shapes'):
        from mmdet.structures import DetDataSample
        from mmengine.registry import MODELS, init_default_scope
        from mmengine.structures import InstanceData
        init_default_scope('mmdet')
        model = MODELS.build(load(name).model).train()
        sample = DetDataSample(metainfo=dict(img_shape=(90, 70), ori_shape=(90, 70), scale_factor=(1., 1.),
                                             batch_input_shape=(90, 70), pad_shape=(90, 70)))
        sample.gt_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
        if 'mask' in name:
            from mmdet.structures.mask import BitmapMasks
            sample.gt_instances.masks = BitmapMasks(np.zeros((0, 90, 70), np.uint8), 90, 70)
        for module in model.modules():               # one value a channel has no variance
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        data_batch = model.data_preprocessor(dict(inputs=[torch.zeros(3, 90, 70, dtype=torch.uint8)],
                                                  data_samples=[sample]), training=True)
        losses, _ = model.parse_losses(model(**data_batch, mode='loss'))
        losses.backward()
        assert losses.isfinite(), name


def test_runner_needs_a_test_part(data, tmp_path):
    config = load(MASK_RCNN)
    config.pop('test_dataloader')
    with pytest.raises(UserError, match='the config has no test_dataloader'):
        build_runner(config, str(tmp_path / 'x'), training=False)
    assert not (tmp_path / 'x').exists()
