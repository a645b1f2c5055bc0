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
import functools
import math
import warnings
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import timm
import torch
import yaml
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
        height, width: Size of the image (default: as the papers count).
        overrides: Changes of the config, by dotted keys ('model.backbone.arch').

    Returns:
        The keys of `counting.count` and `parameters_of_auxiliary_head`, which `parameters` does not include. If the
        authors report MACs, and neither the size nor the config is changed, also `nearest_count` (a key of this dict)
        and its `deviation_percent` from their number.
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
               reported_by_authors=(
                   reported_figures().get(Path(name).stem, {}) if own and not overrides else {}))
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


@functools.cache
def reported_figures() -> Dict[str, Dict[str, float]]:
    """Return what the authors report of a detector or segmenter, by the name of its config.

    These are millions of parameters, GMACs, and AP of boxes and masks or single-scale mIoU in
    percent, as the files metafile.yml of the configs hold them.
    """
    found = {}
    for task in ('detection', 'segmentation'):
        content = yaml.safe_load((configs_folder() / task / 'metafile.yml').read_text(encoding='utf-8'))
        for model in content['Models']:
            metadata = model.get('Metadata', {})
            figures = {'parameters_M': metadata.get('Parameters (M)'),
                       'gmacs': metadata.get('FLOPs (G)')}
            for result in model.get('Results', ()):
                figures.update((name.replace(' ', '_'), value)
                               for name, value in result['Metrics'].items()
                               if name != 'mIoU(ms+flip)')
            found[model['Name']] = {name: value
                                    for name, value in figures.items() if value is not None}
    return found
