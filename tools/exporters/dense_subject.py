"""Prepare the detector or segmenter of a config for the export."""
import copy
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from timm.layers import set_exportable
from torch import Tensor, nn

from ...backbones.export import compose_linear, prepare_for_export
from ...backbones.mm.checkpoints import load_checkpoint
from ...backbones.mm.ssdlite import SSDLiteJointHead
from ..common.cli import UserError, one_line, quiet, weight_errors
from ..engine.config import is_classifier
from ..engine.dense.task import classes_of, network_options
from ..engine.training.building import build
from .dense_heads import Maps, RawDetector, ReferenceDetector, Segmenter, replace_pools
from .dense_preprocessing import input_size, preparation, read_image
from .subject import Subject, describe, described, fuse_norms, map_names

Size = Tuple[int, int]
_STATIC = {
    'detection': 'the anchors of a detector are constants for one image size, so height and width cannot be dynamic',
    'segmentation': 'a segmenter resizes its maps to constant sizes, so height and width cannot be dynamic',
    'features': 'height and width of a detector or segmenter cannot be dynamic',
}


def dense_subject(
        config: Config,
        checkpoint: Optional[str] = None,
        size: Optional[Sequence[int]] = None,
        *,
        nms: bool = False,
        labels: bool = True,
        features: bool = False,
        allow_nonfinite: bool = False,
) -> Subject:
    """Prepare the detector or segmenter of a config.

    A detector returns boxes and scores, see `RawDetector`, and a segmenter logits and labels, see `Segmenter`. Anchors
    and sizes of maps become constants, so the file takes images of one size.

    Args:
        config: As `subquad.tools.engine.config.load` returns it.
        checkpoint: File of weights, or the name of published ones; None for random weights.
        size: Height and width of the network's input; None for those of `input_size`.
        nms: State in the metadata that the file selects the detections; see
            `onnx_graph.append_nms`. The subject is the same.
        labels: Let a segmenter return labels, too.
        features: Export the maps of backbone and neck instead of detections or labels.
        allow_nonfinite: Accept weights that hold NaN or infinities.

    Raises:
        UserError: The config cannot be built, the checkpoint belongs to another model, the head cannot be exported, or
            the network does not take images of this size.
    """
    name = Path(config.filename or 'config').stem
    if is_classifier(config):
        raise UserError(f'{name} is a classification config; export its weights by their file or name')
    if config.get('test_dataloader') is None:
        raise UserError('the config has no test_dataloader, which defines how images are prepared')
    init_default_scope(config.get('default_scope', 'mmengine'))
    eager, module = _build(config, exportable=False), _build(config, exportable=True)
    task = 'features' if features else _task(eager, name)
    classes = classes_of(config.test_dataloader.dataset)
    if checkpoint is not None:
        with weight_errors('; --allow-nonfinite loads it anyway'):
            load_checkpoint(eager, checkpoint, classes, allow_nonfinite, network_options(config))
    size = input_size(config, checkpoint, size)
    preprocessing, color = preparation(config, size)
    for target, source in zip(module.state_dict().values(), eager.state_dict().values()):
        target.copy_(source)
    compose_linear(fuse_norms(module).backbone)
    prepare_for_export(module)
    images = torch.zeros(1, eager.backbone.in_chans, *size)
    try:
        if task == 'detection':
            module, reference, outputs = RawDetector(module, size), ReferenceDetector(eager, size), ('boxes', 'scores')
        elif task == 'segmentation':
            module, reference = Segmenter(module, size, labels), Segmenter(eager, size, labels)
            outputs = ('logits', 'labels') if labels else ('logits',)
        else:
            module, reference = Maps(module), Maps(eager)
        replace_pools(module, images)
        with torch.inference_mode():
            results = reference.eval()(images)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f'{name} does not accept images of {size[0]} x {size[1]}: {one_line(error)}') from error
    if task == 'features':
        outputs = map_names([round(size[0] / y.shape[-2]) for y in results])
    entries = _postprocessing(eager, task, nms, labels)
    metadata = describe(name, task, Path(checkpoint).name if checkpoint else 'random', tuple(images.shape),
                        preprocessing, [] if features else classes, color, **entries)
    metadata['outputs'] = _outputs(outputs, results, nms and task == 'detection')
    return Subject(name, task, module.eval(), reference, size, images.shape[1], outputs, metadata, _STATIC[task],
                   lambda file: read_image(file, metadata).images)


def _build(config: Config, exportable: bool) -> nn.Module:
    """Build the model in evaluation mode; the same random weights in both forms."""
    config = copy.deepcopy(config.model)
    _use_plain_norms(config)
    with set_exportable(exportable), torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        model = build(MODELS, config, 'model')
    return model.eval()


def _use_plain_norms(config: Any) -> None:
    """Replace, in place, BatchNorm that synchronizes the statistics of several GPUs by the ordinary one."""
    if isinstance(config, dict) and config.get('type') == 'SyncBN':
        config['type'] = 'BN'
    for value in config.values() if isinstance(config, dict) else config if isinstance(config, (list, tuple)) else ():
        _use_plain_norms(value)


def _task(model: nn.Module, name: str) -> str:
    """Return 'detection' or 'segmentation'."""
    head = getattr(model, 'bbox_head', None)
    if isinstance(head, SSDLiteJointHead):
        kind = head.test_cfg.get('nms', {}).get('type', 'nms')
        if kind != 'nms':
            raise UserError(f"{name} selects detections by {kind!r}; only 'nms' can be exported")
        return 'detection'
    head = getattr(model, 'decode_head', None)
    if isinstance(head, BaseDecodeHead) and head.out_channels > 1:
        return 'segmentation'
    raise UserError(f'the head of a {type(model).__name__} cannot be exported ({name}); --features exports the maps of '
                    'its backbone and neck')


def _postprocessing(model: nn.Module, task: str, nms: bool, labels: bool) -> Dict[str, Any]:
    """Return what remains to be done with the outputs, as entries of the metadata."""
    if task == 'detection':
        given = model.bbox_head.test_cfg
        most = 2 ** 31 - 1                                    # no limit
        before = given.get('nms_pre', -1)
        return dict(postprocessing=dict(
            type='nms', in_graph=nms, score_threshold=float(given.get('score_thr', 0)),
            iou_threshold=float(given['nms']['iou_threshold']), candidates_per_class=before if before > 0 else most,
            max_detections=given.get('max_per_img', most)))
    if task == 'segmentation':
        entries: Dict[str, Any] = dict(postprocessing=dict(
            type='argmax', in_graph=labels,
            resize=dict(interpolation='bilinear', align_corners=bool(model.decode_head.align_corners))))
        if model.test_cfg.get('mode') == 'slide':
            entries['window'] = dict(size=list(model.test_cfg.crop_size), stride=list(model.test_cfg.stride))
        return entries
    return {}


def _outputs(names: Sequence[str], results: Sequence[Tensor], nms: bool) -> List[Dict[str, Any]]:
    """Describe the outputs of the file; a number of detections that varies is None."""
    entries = described(names, results)
    if not nms:
        return entries
    selected = [dict(name='boxes', shape=[None, 4], dtype='float32'),
                dict(name='scores', shape=[None], dtype='float32'),
                dict(name='labels', shape=[None], dtype='int64')]
    return selected + [dict(entry, name=f"raw_{entry['name']}") for entry in entries]

