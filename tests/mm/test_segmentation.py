"""Segmentation configs and heads: parameter counts, formulas, losses, evaluation and data pipelines."""
import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pairwise import slow

pytest.importorskip('mmseg')

from dense_cases import CONFIGS as FOLDERS
from dense_cases import build_on_meta, load_segmentation
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

FOLDER = FOLDERS / 'segmentation'
CONFIGS = sorted(path.stem for path in FOLDER.glob('*.py'))
SCHEDULES = {'ade20k': '4xb4-120e', 'voc12-coco': '4xb32-50e'}
WIDTHS = ('050', '075', '100', '125', '150', '175', '200')
# Parameters for each width: networks without the auxiliary head (ADE20K at stride 8, VOC at stride 16), and the
# auxiliary head for ADE20K.
TOTALS = {
    ('deeplabv3', 'ade20k'): (6_308_495, 9_576_455, 13_384_831, 17_733_623, 22_622_831, 28_052_455, 34_022_495),
    ('deeplabv3', 'voc12-coco'): (6_242_318, 9_510_278, 13_318_654, 17_667_446, 22_556_654, 27_986_278, 33_956_318),
    ('pspnet', 'ade20k'): (3_616_911, 6_246_151, 9_448_575, 13_224_183, 17_572_975, 22_494_951, 27_990_111),
    ('pspnet', 'voc12-coco'): (3_550_734, 6_179_974, 9_382_398, 13_158_006, 17_506_798, 22_428_774, 27_923_934)}
AUXILIARY = (240_790, 351_382, 461_974, 572_566, 768_534, 1_041_750, 1_356_438)
SMALL = {'model.backbone.arch': 'test', 'model.decode_head.in_channels': 128, 'model.auxiliary_head.in_channels': 96,
         'model.decode_head.channels': 24, 'model.data_preprocessor.size': (96, 96)}


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def small(head, data='ade20k'):
    """Return the config and the network of `head` with the smallest MobileViTv2 and random statistics."""
    config = load_segmentation(f'{head}_mobilevitv2-100_{SCHEDULES[data]}_{data}-512x512', **SMALL)
    model = MODELS.build(config.model)
    shake(model)
    return config, model.eval()


def shake(model):
    """Set random statistics and weights of BatchNorm, so that norms change their inputs in evaluation."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 2)
            module.bias.data.normal_(std=0.3)


def sample(height, width, classes=150, ignored=20):
    """Return the labels of an image; the first `ignored` rows have no label."""
    labels = torch.randint(classes, (1, height, width))
    labels[:, :ignored] = 255
    return SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo=dict(img_shape=(height, width)))


@pytest.mark.parametrize('head, data', TOTALS)
def test_parameter_counts_are_the_published_ones(head, data):
    for width, total, auxiliary in zip(WIDTHS, TOTALS[head, data], AUXILIARY):
        model = build_on_meta(load_segmentation(f'{head}_mobilevitv2-{width}_{SCHEDULES[data]}_{data}-512x512'))
        assert count(model) - count(model.auxiliary_head) == total, width
        m = model.auxiliary_head.channels
        classes = 150 if data == 'ade20k' else 21
        assert count(model.auxiliary_head) == auxiliary - (m + 1) * (150 - classes), width
        assert model.decode_head.num_classes == model.auxiliary_head.num_classes == classes
        assert model.backbone.out_strides == ([8, 8] if data == 'ade20k' else [16, 16])
        if head == 'deeplabv3':
            assert model.decode_head.dilations == ((12, 24, 36) if data == 'ade20k' else (6, 12, 18))


def test_upernet_parameter_counts_are_the_papers():
    """The paper's 43, 56 and 83 M include the auxiliary head; without it PPMA-T has 42 M."""
    configs = [load_segmentation(f'upernet_ppma-{size}_8xb2-160k_ade20k-512x512') for size in 'tsb']
    totals = [count(build_on_meta(config)) for config in configs]
    assert totals == [43_092_460, 55_726_660, 83_120_736]
    assert [round(total / 1e6) for total in totals] == [43, 56, 83]


# Configs that differ in the size of the backbone alone are slow.
ONE_A_SCHEDULE = {(name.split('_')[0], name.split('_', 2)[-1]): name for name in CONFIGS}.values()


@pytest.mark.parametrize('name', [*ONE_A_SCHEDULE, *slow(*(name for name in CONFIGS if name not in ONE_A_SCHEDULE))])
def test_config_builds_and_pipelines_compose(name):
    config = load_segmentation(name)
    model = build_on_meta(config)
    heads = [model.decode_head, *([model.auxiliary_head] if model.with_auxiliary_head else [])]
    for head in heads:
        indices = [head.in_index] if isinstance(head.in_index, int) else head.in_index
        channels = [head.in_channels] if isinstance(head.in_channels, int) else list(head.in_channels)
        maps = [model.neck.out_channels] * 4 if model.with_neck else model.backbone.out_channels
        assert channels == [maps[i] for i in indices]
    if model.with_neck:
        assert model.neck.in_channels == model.backbone.out_channels
        assert list(model.decode_head.feature_strides) == model.backbone.out_strides
    for loader, pipeline in (('train', 'train'), ('val', 'test'), ('test', 'test')):
        dataset = config[f'{loader}_dataloader'].dataset
        for part in dataset.get('datasets', [dataset]):
            assert part.pipeline == config[f'{pipeline}_pipeline']
    for pipeline in ('train_pipeline', 'test_pipeline', 'tta_pipeline'):
        if pipeline in config:
            Compose(config[pipeline])
    assert 'upernet_ppma' not in name or 'tta_pipeline' in config


def test_sliding_windows_are_the_published_ones():
    for size in 'tsb':
        ade, city = (load_segmentation(f'upernet_ppma-{size}_{data}').model.test_cfg
                     for data in ('8xb2-160k_ade20k-512x512', '8xb1-160k_cityscapes-1024x1024'))
        assert (ade.mode, ade.crop_size, ade.stride) == ('slide', (512, 512), (341, 341))
        assert (city.mode, city.crop_size) == ('slide', (1024, 1024))
        assert city.stride == ((768, 768) if size == 't' else (341, 341))


def test_whole_images_replace_windows_by_an_option(monkeypatch):
    """As the authors' multi-scale configs test; the README gives the option and says which figures belong to which."""
    option = 'model.test_cfg.mode=whole'
    assert f'--tta --cfg-options {option}' in (FOLDER / 'README.md').read_text()
    config = load_segmentation('upernet_ppma-t_8xb2-160k_ade20k-512x512', **dict([option.split('=')]))
    _, model = small('deeplabv3')
    model.test_cfg.update(config.model.test_cfg)
    monkeypatch.setattr(model, 'slide_inference', None)
    monkeypatch.setattr(model, 'whole_inference', lambda inputs, metas: inputs.shape)
    assert model.inference(torch.zeros(1, 3, 600, 700), [dict(ori_shape=(600, 700))]) == (1, 3, 600, 700)


def unit(module, x, dilation=1):
    """Compute convolution, BatchNorm in evaluation and ReLU by their formulas."""
    conv, norm = module.conv, module.bn
    assert conv.bias is None
    x = F.conv2d(x, conv.weight, padding=conv.kernel_size[0] // 2 * dilation, dilation=dilation)
    x = (x - norm.running_mean[:, None, None]) / (norm.running_var[:, None, None] + 1e-5).sqrt()
    return (x * norm.weight[:, None, None] + norm.bias[:, None, None]).clamp(min=0)


def resized(x, size, align_corners):
    return F.interpolate(x, size, mode='bilinear', align_corners=align_corners)


@pytest.mark.parametrize('size', [(9, 13), (5, 4)])
def test_heads_compute_their_formulas(size):
    init_default_scope('mmseg')
    maps = [torch.randn(2, 8, 3, 3).double(), torch.randn(2, 80, *size).double()]
    x = maps[1]
    common = dict(in_channels=80, in_index=1, channels=24, num_classes=7)
    deeplab = MODELS.build(dict(type='DeepLabv3Head', dilations=(2, 3, 5), **common)).double().eval()
    pspnet = MODELS.build(dict(type='PSPNetHead', **common)).double().eval()
    for head in (deeplab, pspnet):
        shake(head)
        assert head.dropout.p == 0.1 and isinstance(head.dropout, torch.nn.Dropout2d) and head.align_corners
        torch.nn.init.normal_(head.conv_seg.weight)
    with torch.no_grad():
        branches = [unit(deeplab.aspp[0], x), *(unit(deeplab.aspp[n], x, d) for n, d in ((1, 2), (2, 3), (3, 5)))]
        branches.append(resized(unit(deeplab.aspp[4], x.mean((2, 3), keepdim=True)), size, False))
        y = unit(deeplab.project, torch.cat(branches, 1))
        expected = F.conv2d(y, deeplab.conv_seg.weight, deeplab.conv_seg.bias)
        torch.testing.assert_close(deeplab(maps), expected)
        assert expected.std() > 0.1

        levels = [resized(unit(module, F.adaptive_avg_pool2d(x, n)), size, True)
                  for n, module in zip((1, 2, 3, 6), pspnet.branches)]
        assert [level.shape[1] for level in levels] == [16] * 4       # 80 / 4, down to a multiple of 16
        y = unit(pspnet.fusion, torch.cat([x, *levels], 1))
        torch.testing.assert_close(pspnet(maps), F.conv2d(y, pspnet.conv_seg.weight, pspnet.conv_seg.bias))


@pytest.mark.parametrize('head', ['deeplabv3', 'pspnet'])
def test_losses_average_over_labeled_pixels(head):
    """The loss is the mean over labeled pixels at the size of the image; the auxiliary head has weight 0.4."""
    _, model = small(head)
    x, data = torch.rand(1, 3, 64, 96), sample(64, 96)
    with torch.no_grad():
        losses = model.loss(x, [data])
        levels = model.backbone(x)
        for name, part, weight in (('decode', model.decode_head, 1.), ('aux', model.auxiliary_head, 0.4)):
            logits = resized(part(levels), (64, 96), True)
            expected = weight * F.cross_entropy(logits, data.gt_sem_seg.data, ignore_index=255)
            torch.testing.assert_close(losses[f'{name}.loss_ce'], expected)
    model.train()
    losses = model.loss(torch.rand(2, 3, 64, 64), [sample(64, 64), sample(64, 64)])
    sum(value for key, value in losses.items() if 'loss' in key).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    with pytest.raises(ValueError, match='more than 1 value per channel'):
        model.loss(x, [data])


@pytest.mark.parametrize('head, data, size', [('deeplabv3', 'ade20k', (136, 104)), ('pspnet', 'voc12-coco', (75, 100)),
                                              ('deeplabv3', 'voc12-coco', (33, 190))])
def test_any_image_size_is_segmented(head, data, size):
    """Predictions have the size of the picture before resizing."""
    _, model = small(head, data)
    image = torch.randint(256, (3, *size), dtype=torch.uint8)
    meta = dict(ori_shape=(50, 61), img_shape=size, padding_size=[0, 0, 0, 0])
    with torch.no_grad():
        prediction, = model.test_step(dict(inputs=[image], data_samples=[SegDataSample(metainfo=meta)]))
        x = image.flip(0)[None] / 255.                                # RGB from BGR, no mean or deviation
        logits = model.decode_head(model.backbone(x))
    expected = resized(logits, (50, 61), True)[0]
    torch.testing.assert_close(prediction.seg_logits.data, expected)
    assert prediction.pred_sem_seg.data.shape == (1, 50, 61) and expected.isfinite().all()


# (height, width) of a picture -> sizes of the network's input in the authors' evaluation at stride 8 and at stride 16.
SIZES = {(480, 640): [(512, 680), (512, 672)], (333, 500): [(512, 768), (512, 768)],
         (2500, 300): [(4264, 512), (4256, 512)], (97, 90): [(544, 512), (544, 512)], (512, 519): [(512, 512)] * 2,
         (1536, 2050): [(512, 680), (512, 672)], (600, 599): [(512, 512)] * 2}


def test_test_pipeline_sizes_are_the_authors():
    for data, stride, column in (('ade20k', 8, 0), ('voc12-coco', 16, 1)):
        for kind in ('deeplabv3', 'pspnet'):
            config = load_segmentation(f'{kind}_mobilevitv2-200_{SCHEDULES[data]}_{data}-512x512')
            assert config.model.backbone.output_stride == stride
            pipeline = Compose([step for step in config.test_pipeline if 'Load' not in step.type])
            for size, expected in SIZES.items():
                done = pipeline(dict(img=np.zeros((*size, 3), np.uint8), ori_shape=size, img_shape=size))
                assert done['inputs'].shape[1:] == done['data_samples'].img_shape == expected[column], (data, size)


@pytest.mark.parametrize('head, data, size', [('deeplabv3', 'ade20k', (120, 151)), ('pspnet', 'voc12-coco', (97, 60))])
def test_evaluation_equals_the_authors(head, data, size, tmp_path):
    """The pipeline is: Pillow's bicubic, bilinear with aligned corners, the network, one interpolation."""
    from PIL import Image
    config, model = small(head, data)
    picture = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / 'picture.png')
    pipeline = Compose([step for step in config.test_pipeline if step.type != 'LoadAnnotations'])
    done = pipeline(dict(img_path=str(tmp_path / 'picture.png')))
    height, width = size
    sides = (512, int(512 * width / height)) if height <= width else (int(512 * height / width), 512)
    image = np.array(Image.fromarray(picture).resize(sides[::-1], Image.Resampling.BICUBIC))
    stride = 8 if data == 'ade20k' else 16
    x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    x = resized(x, [side // stride * stride for side in sides], True)
    with torch.no_grad():
        result, = model.test_step(dict(inputs=[done['inputs']], data_samples=[done['data_samples']]))
        fed = model.data_preprocessor(dict(inputs=[done['inputs']], data_samples=[done['data_samples']]))['inputs']
        torch.testing.assert_close(fed, x, atol=1e-6, rtol=0)
        expected = resized(model.decode_head(model.backbone(x)), size, True)[0]
    torch.testing.assert_close(result.seg_logits.data, expected, atol=1e-4, rtol=1e-4)
    assert (result.pred_sem_seg.data == expected.argmax(0)).float().mean() > 0.999


def test_batches_of_two_sizes_and_sliding_windows():
    """Pictures of one batch may differ in size, and sliding windows keep MMSegmentation's two interpolations."""
    _, model = small('deeplabv3')
    x = torch.randint(256, (2, 3, 64, 96), dtype=torch.uint8)
    metas = [dict(ori_shape=size, img_shape=(64, 96)) for size in ((30, 50), (70, 41))]

    def run(numbers):
        data = dict(inputs=[x[n] for n in numbers], data_samples=[SegDataSample(metainfo=metas[n]) for n in numbers])
        with torch.no_grad():
            return [sample.seg_logits.data for sample in model.test_step(data)]
    both, single = run([0, 1]), run([0]) + run([1])
    for one, other, meta in zip(both, single, metas):
        assert one.shape[1:] == meta['ori_shape']
        torch.testing.assert_close(one, other)
    model.test_cfg.update(mode='slide', crop_size=(64, 96), stride=(48, 48))        # a single window: the whole image
    with torch.no_grad():
        logits = resized(model.decode_head(model.backbone(x[:1].flip(1) / 255.)), (64, 96), True)
    torch.testing.assert_close(run([0])[0], resized(logits, (30, 50), True)[0])


def test_resize_transform_errors():
    from mmengine.registry import TRANSFORMS
    late = TRANSFORMS.build(dict(type='ResizeToStride', stride=8))
    with pytest.raises(ValueError, match='LoadAnnotations after it'):
        late(dict(img=np.zeros((9, 9, 3), np.uint8), gt_seg_map=np.zeros((9, 9), np.uint8)))
    tiny = late(dict(img=np.full((3, 20), 7, np.uint8)))                            # no smaller than a stride
    assert tiny['img'].shape == tiny['img_shape'] == (8, 16)
    np.testing.assert_allclose(tiny['img'], 7, rtol=1e-6)


def test_training_augmentation(tmp_path):
    from mmcv import imwrite
    config = load_segmentation('deeplabv3_mobilevitv2-100_4xb4-120e_ade20k-512x512')
    rng = np.random.default_rng(0)
    image = rng.integers(1, 256, (60, 90, 3), dtype=np.uint8)
    image[..., 2] = 255                                               # BGR
    imwrite(image, str(tmp_path / 'image.png'))
    imwrite(np.full((60, 90), 7, np.uint8), str(tmp_path / 'labels.png'))
    data = dict(img_path=str(tmp_path / 'image.png'), seg_map_path=str(tmp_path / 'labels.png'), label_map=None,
                reduce_zero_label=True)
    pipeline = Compose(config.train_pipeline)
    for _ in range(8):
        done = pipeline(dict(data, seg_fields=[]))
        labels = done['data_samples'].gt_sem_seg.data[0]
        assert done['inputs'].shape == (3, 512, 512) and done['inputs'].dtype == torch.uint8
        assert labels.shape == (512, 512) and set(labels.unique().tolist()) <= {6, 255}
        assert (labels == 6).sum() >= 0.8 * 256 * 384                 # a short side of 256 or more, rotated
    for kind in ('RandomGaussianBlur', 'RandomChannelOrder'):
        never, always = Compose([dict(type=kind, prob=0.)]), Compose([dict(type=kind, prob=1.)])
        assert never(dict(img=image))['img'] is image
        changed = [always(dict(img=image))['img'] for _ in range(20)]
        assert all(x.shape == image.shape and x.dtype == np.uint8 for x in changed)
        assert any((x != image).any() for x in changed)
        places = {tuple(int(c) for c in np.flatnonzero((x == 255).all((0, 1)))) for x in changed}
        assert places == ({(2,)} if 'Blur' in kind else {(0,), (1,), (2,)})
        sums = [sorted(x.sum((0, 1)).tolist()) == sorted(image.sum((0, 1)).tolist()) for x in changed]
        assert all(sums) if 'Order' in kind else not all(sums)


def test_readme_code_converts_coco_to_voc(tmp_path):
    """One image has a bus under a person and a giraffe, which is no VOC class; the other has no instances."""
    pytest.importorskip('pycocotools')
    from PIL import Image

    def rectangle(n, category, x, y, width, height):
        polygon = [[x, y, x + width, y, x + width, y + height, x, y + height]]
        return dict(id=n, image_id=25, category_id=category, segmentation=polygon, area=width * height, iscrowd=0,
                    bbox=[x, y, width, height])
    content = dict(
        images=[dict(id=n, file_name=f'{n:012}.jpg', height=20, width=30) for n in (25, 9)],
        categories=[dict(id=n, name=str(n)) for n in (1, 6, 25)],
        annotations=[rectangle(1, 1, 0, 0, 10, 10), rectangle(2, 6, 5, 5, 10, 10), rectangle(3, 25, 20, 0, 10, 20)])
    (tmp_path / 'data/coco/annotations').mkdir(parents=True)
    (tmp_path / 'data/coco/annotations/instances_train2017.json').write_text(json.dumps(content))
    code = (FOLDER / 'README.md').read_text().split('```python\n')[1].split('```')[0]
    before = os.getcwd()
    try:
        os.chdir(tmp_path)
        exec(code, {})
    finally:
        os.chdir(before)
    folder = tmp_path / 'data/coco/voc21'
    assert (folder / 'train2017.txt').read_text() == '000000000009\n000000000025\n'
    expected = np.zeros((20, 30), np.uint8)
    expected[5:15, 5:15] = 6                                          # bus
    expected[:10, :10] = 15                                           # person
    np.testing.assert_array_equal(np.array(Image.open(folder / 'train2017/000000000025.png')), expected)
    assert not np.array(Image.open(folder / 'train2017/000000000009.png')).any()
