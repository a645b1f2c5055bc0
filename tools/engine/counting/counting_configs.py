"""Count parameters and MACs of the detectors and segmenters in config files.

The following rules reproduce the numbers of the papers:
- One image is counted as it enters the network, padded as the config's preprocessor pads it. Its size (height x width)
  is 800 x 1280 for detectors that test at a short side of 800, the test size for other detectors, the height of the
  crop x 2048 for UPerNet, and the crop for other segmenters.
- The backbone, the neck and the dense heads are counted, and the final resizing of a segmenter.
- In two-stage detectors, the box heads are counted for 1000 regions and the mask heads for 100, in every stage of a
  cascade, as MMDetection 2 counted them. RoIAlign and NMS have no weights and are not counted.
- The auxiliary head is not counted, because only training uses it. Its parameters are given separately.

With these rules, every number of PPMA's tables 2 and 3 and of MobileViTv2's tables 3 and 4 is within 1 % of one count:
Mask R-CNN and MobileViTv2 of `without attention products, with norms`, and UPerNet of `all`. The exceptions are PSPNet
at width 1.75 (`all`) and two numbers that are rounded too coarsely. UPerNet's 43, 56 and 83 M parameters include the
auxiliary head, the numbers of MobileViTv2 do not.
"""
import difflib
import math
import warnings
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import timm
import torch
from torch import nn

from ...common.cli import UserError, one_line
from ..config import configs_folder, find, known_configs, load
from ..zoo import takes_images
from .counts import three_counts

REGIONS, MASKS = 1000, 100
COUNTS = {'macs': 'all', 'macs_without_attention': 'without attention products',
          'macs_with_norms': 'without attention products, with norms'}


def is_config(name: str) -> bool:
    """True for a path, the name of a config, or a name that is closer to a config's than to any model's."""
    if timm.is_model(name):
        return False
    if name.endswith('.py') or '/' in name or name in known_configs():
        return True
    dense = [each for each in known_configs() if find(each).parent.name in ('detection', 'segmentation')]
    nearest = difflib.get_close_matches(name, [*timm.list_models(), *dense], n=1, cutoff=0.5)
    return bool(nearest) and not timm.is_model(nearest[0])


def count_config(name: str, height: Optional[int] = None, width: Optional[int] = None, /,
                 **overrides: Any) -> Dict[str, Any]:
    """Count the network of a detection or segmentation config on the meta device.

    Args:
        name: Path or name of the config.
        height: Image height (default: as the papers count).
        width: Image width (default: as the papers count).
        overrides: Changes of the config, by dotted keys ('model.backbone.arch').

    Returns:
        The keys of `counting.count` and `parameters_of_auxiliary_head`, which `parameters` does not include. If the
        authors report MACs, and neither the size nor the config is changed, also `nearest_count` (a key of this dict)
        and its `deviation_percent` from their number.

    Raises:
        UserError: The config is unknown or of another kind, or its network cannot be built or refuses the size.
    """
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import MODELS, DefaultScope

    from ..dense.channels import check_channels
    config = load(name, overrides)
    if config.model.get('type') == 'TimmClassifier':
        raise UserError(f'{name} trains a classifier: use subquad stats {config.model.name}'
                        if takes_images(config.model.name) else f'{name} trains a model of tokens: use subquad train '
                        f'{name} --dry-run, which counts its parameters')
    usual = not (height and width or overrides)
    divisor = config.model.get('data_preprocessor', {}).get('pad_size_divisor', 1)
    height, width = (math.ceil(side / divisor) * divisor for side in (
        (height, width) if height and width else _image_size(name, config)))
    try:
        with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')), torch.device('meta'), \
                warnings.catch_warnings():
            warnings.simplefilter('ignore')             # warnings about training
            model = revert_sync_batchnorm(MODELS.build(config.model))
            check_channels(model)
            counts = three_counts(model, lambda images: _forward(name, model, torch.empty(images, 3, height, width)))
    except UserError:
        raise
    except Exception as error:          # a config can raise anything, and MMEngine wraps it
        raise UserError(f'{name} at {height}x{width}: {one_line(error)}') from error
    auxiliary = getattr(model, 'auxiliary_head', None)
    auxiliary = sum(p.numel() for p in auxiliary.parameters()) if auxiliary is not None else 0
    own = configs_folder() in find(name).absolute().parents
    row = dict(model=Path(name).stem, size=[height, width], options=overrides,
               parameters=sum(p.numel() for p in model.parameters()) - auxiliary,
               parameters_of_auxiliary_head=auxiliary, **counts,
               reported_by_authors=REPORTED.get(Path(name).stem, {}) if own and not overrides else {})
    gmacs = row['reported_by_authors'].get('gmacs')
    if gmacs and usual:
        row['nearest_count'] = min(COUNTS, key=lambda count: abs(row[count] / 1e9 - gmacs))
        row['deviation_percent'] = round(100 * (row[row['nearest_count']] / 1e9 / gmacs - 1), 2)
    return row


def _image_size(name: str, config) -> Tuple[int, int]:
    """Height and width at which papers count; see the rules above."""
    crop, head = config.model.get('data_preprocessor', {}).get('size'), config.model.get('decode_head')
    if crop and head:
        return (crop[0], 2048) if isinstance(head, dict) and head.type == 'UPerHead' else tuple(crop)
    pipeline = config.get('test_dataloader', {}).get('dataset', {}).get('pipeline', [])
    for scale in [step['scale'] for step in pipeline if step['type'] == 'Resize' and 'scale' in step]:
        width, height = (scale, scale) if isinstance(scale, int) else scale
        return (800, 1280) if min(height, width) == 800 else (height, width)
    raise UserError(f'{name} has neither a crop size nor a Resize in its test pipeline: give --size')


def _forward(name: str, model, images) -> None:
    """Run the counted parts on images (B, 3, H, W)."""
    if hasattr(model, 'encode_decode'):
        model.encode_decode(images, [dict(img_shape=images.shape[2:])] * len(images))
    elif hasattr(model, 'roi_head'):
        model.rpn_head(model.extract_feat(images))
        _forward_regions(name, model.roi_head, len(images))
    elif hasattr(model, 'decoder') or hasattr(model, 'panoptic_head'):
        raise UserError(f'{name}: detectors with queries, such as {type(model).__name__}, are not counted')
    else:
        model(images, mode='tensor')


def _forward_regions(name: str, roi_head, images: int) -> None:
    """Run the box and mask heads on empty features of the size that RoIAlign returns."""
    head_type = type(roi_head).__name__
    if head_type not in ('StandardRoIHead', 'CascadeRoIHead') or roi_head.with_shared_head:
        raise UserError(f'{name}: two-stage detectors can be counted if they have a StandardRoIHead or CascadeRoIHead '
                        f'without a shared head, got {head_type}')
    for kind, regions in (('bbox', REGIONS), ('mask', MASKS)):
        heads, extractors = (getattr(roi_head, f'{kind}_{part}', None) for part in ('head', 'roi_extractor'))
        if heads is None:
            continue
        stages = zip(heads, extractors) if isinstance(heads, nn.ModuleList) else [(heads, extractors)]
        for head, extractor in stages:
            head(torch.empty(images * regions, extractor.out_channels, *extractor.roi_layers[0].output_size))


def reported(row: Dict[str, Any]) -> str:
    """The authors' numbers in words; for a config with the nearest count and its deviation."""
    words = []
    for key, value in row['reported_by_authors'].items():
        near = f" ({COUNTS[row['nearest_count']]}: {row['deviation_percent']:+.2f} %)" if 'nearest_count' in row else ''
        words.append({'parameters_M': f'{value} M', 'gmacs': f'{value} G{near}', 'top1': f'top-1 {value}'}.get(
            key, f"{key.replace('_', ' ')} {value}"))
    return ', '.join(words) or '-'


# Reported by the authors in PPMA's tables 2 and 3 and its repository (3x, Cityscapes), and in MobileViTv2's tables 3
# and 4 and its repository (all widths). Millions of parameters; GMACs; AP of boxes and masks, or single-scale mIoU, in
# percent.
_DETECTORS = {
    'mask-rcnn_ppma-t_fpn_1x_coco': (33, 218, 47.1, 42.4), 'mask-rcnn_ppma-s_fpn_1x_coco': (46, 263, 49.2, 43.8),
    'mask-rcnn_ppma-b_fpn_1x_coco': (73, 374, 51.1, 45.5), 'mask-rcnn_ppma-b_fpn_3x-ms_coco': (None, None, 52.6, 46.3),
    **{f'ssdlite_mobilevitv2-{width}_coco-320': numbers for width, numbers in {
        '050': (2.0, 0.9, 21.24), '075': (3.6, 1.8, 24.57), '100': (5.6, None, 26.47), '125': (8.2, None, 27.85),
        '150': (11.3, None, 28.83), '175': (14.9, 9.0, 29.52), '200': (19.1, None, 30.21)}.items()}}
_SEGMENTERS = {
    **{f'upernet_ppma-{size}_8xb2-160k_ade20k-512x512': numbers for size, numbers in {
        't': (43, 983, 48.7), 's': (56, 984, 51.1), 'b': (83, 1137, 52.3)}.items()},
    **{f'upernet_ppma-{size}_8xb1-160k_cityscapes-1024x1024': (None, None, miou)
        for size, miou in (('t', 82.7), ('s', 83.7), ('b', 83.9))},
    **{f'pspnet_mobilevitv2-{width}_4xb4-120e_ade20k-512x512': numbers for width, numbers in {
        '050': (3.6, 15.4, 31.77), '075': (6.2, None, 35.22), '100': (9.4, None, 36.57), '125': (13.2, None, 38.76),
        '150': (17.6, None, 38.74), '175': (22.5, 95.9, 39.82)}.items()},
    **{f'deeplabv3_mobilevitv2-{width}_4xb4-120e_ade20k-512x512': numbers for width, numbers in {
        '050': (6.3, None, 31.93), '075': (9.6, 40.0, 34.70), '100': (13.4, None, 37.06), '125': (17.7, None, 38.42),
        '150': (22.6, None, 38.91), '175': (28.1, None, 39.53), '200': (34.0, 147.0, 40.94)}.items()},
    **{f'pspnet_mobilevitv2-{width}_4xb32-50e_voc12-coco-512x512': (None, None, miou) for width, miou in (
        ('050', 74.62), ('075', 77.44), ('100', 78.92), ('125', 79.40), ('150', 79.93), ('175', 80.2))},
    **{f'deeplabv3_mobilevitv2-{width}_4xb32-50e_voc12-coco-512x512': (None, None, miou) for width, miou in (
        ('050', 75.07), ('100', 78.94), ('125', 79.68), ('150', 80.30))}}
REPORTED = {name: {key: value for key, value in zip(keys, numbers) if value is not None}
            for table, keys in ((_DETECTORS, ('parameters_M', 'gmacs', 'box_AP', 'mask_AP')),
                                (_SEGMENTERS, ('parameters_M', 'gmacs', 'mIoU'))) for name, numbers in table.items()}
