"""The table of published weights: names, sources, figures, and errors for unknown names."""
import dataclasses
import re
from collections import Counter

import pytest
import timm
import yaml
from helpers import ROOT

from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.cache import sha256_of
from subquad.backbones.weights.convert import FORMATS
from subquad.backbones.weights.download import SHIPPED
from subquad.backbones.weights.registry import TASKS, WEIGHTS, find, of_arch
from subquad.tools.engine.counting.counts import REPORTED

ROWS = list(WEIGHTS.values())


def _rows(**fields):
    return [row for row in ROWS if all(getattr(row, name) == value for name, value in fields.items())]


@pytest.mark.parametrize('row', ROWS, ids=lambda row: row.name)
def test_rows_are_complete(row):
    assert WEIGHTS[row.name] is row and row.task in TASKS and row.format in FORMATS and row.license
    assert row.arch in timm.list_models() and '.' not in row.tag
    assert [bool(row.repo and row.filename), bool(row.url), bool(row.file), bool(row.page)].count(True) == 1
    assert row.sha256 is None or re.fullmatch('[0-9a-f]{64}', row.sha256)
    assert (row.crop_pct is None) == (row.config is not None) == (row.task != 'classification')
    assert row.reported or row.file
    if row.config:
        folder = ROOT / 'configs' / row.task
        assert (folder / f'{row.config}.py').is_file()
        size = row.arch.removesuffix('_512').rpartition('_')[2]
        assert (size if size.isdecimal() else f'-{size[0]}') in row.config
    if row.file:
        assert sha256_of(SHIPPED / row.file) == row.sha256 and row.size == (SHIPPED / row.file).stat().st_size


def test_no_two_rows_name_one_file():
    assert max(Counter(row.source for row in ROWS if not row.page).values()) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROWS[0].sha256 = ''


def test_ppma_files():
    """Three classifiers, four detectors, three segmenters of ADE20K and three of Cityscapes, in one repository."""
    rows = _rows(format='ppma')
    assert Counter(row.task for row in rows) == dict(classification=3, detection=4, segmentation=6)
    assert {row.repo for row in rows} == {'ZhongchenZhao/PPMA'}
    assert find('ppma_small').filename == 'checkpoints/classification/PPMA_S_202504021000/best.pth'
    assert find('ppma_base.mask_rcnn_3x_coco').filename.endswith('mask_rcnn_ppma_base_fpn_3x_coco/epoch_36.pth')
    city = find('ppma_tiny.upernet_160k_cityscapes')
    assert city.filename == 'checkpoints/segmentation/upernet_ppma_tiny_1024x1024_160k_cityscapes_ss/iter_160000.pth'
    assert city.num_classes == 19 and city.reported == {'mIoU': 82.7, 'mIoU_ms': 83.5}


def test_mobilevitv2_files():
    """timm's 13 repositories, and the authors' 20 classifiers, 7 detectors and 22 segmenters."""
    assert Counter(row.task for row in _rows(format='cvnets')) == dict(classification=20, detection=7, segmentation=22)
    hub = _rows(format='timm')
    assert len(hub) == 13
    for row in hub:                # timm knows the same repositories, sizes and crops
        theirs = timm.get_pretrained_cfg(row.repo.removeprefix('timm/'))
        assert (row.repo, row.input_size, row.crop_pct) == (theirs.hf_hub_id, theirs.input_size, theirs.crop_pct)
        assert (row.mean, row.std, row.interpolation) == (theirs.mean, theirs.std, theirs.interpolation)
        assert row.license == theirs.license
    base = 'https://docs-assets.developer.apple.com/ml-research/models/cvnets-v2'
    assert {row.url.removeprefix(base) for row in of_arch('subquad_mobilevitv2_125') if row.url} == {
        '/classification/mobilevitv2/imagenet1k/256x256/mobilevitv2-1.25.pt',
        '/classification/mobilevitv2/imagenet1k/384x384/mobilevitv2-1.25.pt',
        '/detection/mobilevitv2/coco-ssd-mobilevitv2-1.25.pt',
        '/segmentation/ade20k/mobilevitv2/deeplabv3-mobilevitv2-1.25.pt',
        '/segmentation/ade20k/mobilevitv2/pspnet-mobilevitv2-1.25.pt',
        '/segmentation/pascalvoc/mobilevitv2/deeplabv3-mobilevitv2-1.25.pt',
        '/segmentation/pascalvoc/mobilevitv2/pspnet-mobilevitv2-1.25.pt'}


def test_fine_tuned_at_384():
    """timm has no copies of these seven files."""
    rows = _rows(tag='cvnets_in1k_384')
    assert len(rows) == 7
    for row in rows:
        assert row.input_size == (3, 384, 384) and row.crop_pct == 1.0 and '/imagenet1k/384x384/' in row.url
    assert [row.reported['top1'] for row in rows] == [72.14, 76.98, 79.68, 80.94, 81.50, 82.04, 82.17]


def test_find():
    assert find('ppma_tiny').name == 'ppma_tiny.in1k'
    assert find('subquad_mobilevitv2_200').name == 'subquad_mobilevitv2_200.cvnets_in1k'
    assert find('subquad_mobilevitv2_200.ssdlite_coco').task == 'detection'
    assert [row.tag for row in of_arch('ppma_tiny')] == ['in1k', 'mask_rcnn_1x_coco', 'upernet_160k_ade20k',
                                                         'upernet_160k_cityscapes']
    assert of_arch('myo_tiny') == []


@pytest.mark.parametrize('name, message', [
    ('ppma_tinny', r'^no weights of ppma_tinny are published; did you mean .*\bppma_tiny\b'),
    ('ppma_tiny.in21k', r'^there are no weights ppma_tiny.in21k; ppma_tiny has ppma_tiny.in1k, ppma_tiny.mask_rcnn'),
    ('myo_tiny', r'^no weights of myo_tiny are published; there are weights of ppma_tiny, .*, subquad_mobilevitv2_200.*'
                 r' \(`subquad weights list` shows all\)$'),
    ('mobilevitv2_100', 'did you mean subquad_mobilevitv2_100'),
    ('', r'^the name of the weights is empty'),
])
def test_unknown_names(name, message):
    with pytest.raises(WeightsError, match=message):
        find(name)


def test_figures_agree_with_those_of_configs_and_counts():
    """The table has the zoos' figures, which the papers print with fewer digits."""
    names = {'box_AP': 'box AP', 'mask_AP': 'mask AP', 'mIoU': 'mIoU', 'mIoU_ms': 'mIoU(ms+flip)'}
    metafiles = [yaml.safe_load((ROOT / 'configs' / task / 'metafile.yml').read_text()) for task in TASKS[1:]]
    results = {model['Name']: {name: figure for result in model.get('Results', [])
                               for name, figure in result['Metrics'].items()}
               for metafile in metafiles for model in metafile['Models']}
    differences, compared = [], 0
    for row in ROWS:
        if row.task == 'classification':
            printed = dict(zip(('parameters', 'macs', 'top1'), REPORTED.get(row.arch, ())))
            printed = printed if row is find(row.arch) else {}
        else:
            printed = {key: results.get(row.config, {}).get(name) for key, name in names.items()}
        for key, figure in row.reported.items():
            compared += printed.get(key) is not None
            if printed.get(key) is not None and abs(printed[key] - figure) > 0.0501:
                differences.append((row.name, key, figure, printed[key]))
    assert compared > 40 and differences == []
