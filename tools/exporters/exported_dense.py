"""Detectors and segmenters in files of `subquad export`, for `subquad predict` and `subquad test`."""
from pathlib import Path
from typing import Any, Dict, List

import torch.nn.functional as F
from mmdet.models.layers import multiclass_nms
from mmdet.structures import DetDataSample
from mmengine.model import BaseModel
from mmengine.structures import InstanceData, PixelData
from mmseg.structures import SegDataSample
from torch import Tensor

from ..engine.dense.prediction import Predictor, hues
from .dense_preprocessing import PreparedImage, read_image
from .exported import ExportedModel


class ExportedPredictor(Predictor):
    """`Predictor` on an exported file."""

    def __init__(self, model: ExportedModel):
        self.model, self.classes = model, model.metadata['labels']
        self.palette = hues(len(self.classes))

    def __call__(self, file: Path) -> Any:
        metadata = self.model.metadata
        prepared, detects = read_image(file, metadata), metadata['task'] == 'detection'
        sample = (DetDataSample if detects else SegDataSample)(
            metainfo=dict(img_path=str(file), ori_shape=prepared.original))
        outputs, after = self.model.outputs(prepared.images), metadata['postprocessing']
        if detects:
            sample.pred_instances = detections(outputs, after, prepared)
        else:
            labels = segments(outputs['logits'], after['resize'], prepared)
            sample.pred_sem_seg = PixelData(data=labels[None])
        return sample


class ExportedNetwork(BaseModel):
    """A predictor in place of a network of MMDetection or MMSegmentation in the test loop."""

    def __init__(self, predictor: ExportedPredictor):
        super().__init__()
        self.predictor = predictor

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError('an exported file has no other mode than prediction')

    def test_step(self, data: Dict[str, Any]) -> List[Any]:
        for sample in data['data_samples']:
            sample.update(self.predictor(Path(sample.img_path)))
        return data['data_samples']


def detections(outputs: Dict[str, Tensor], settings: Dict[str, Any], prepared: PreparedImage) -> InstanceData:
    """Return the boxes, in pixels of the image file, scores and labels, after non-maximum suppression if it is due."""
    if settings['in_graph']:
        boxes, scores, labels = (outputs[name] for name in ('boxes', 'scores', 'labels'))
    else:
        rows = outputs['scores'][0]
        worst = rows.topk(min(settings['candidates_per_class'], len(rows)), 0).values[-1]
        # The last column is the background's.
        rows = F.pad(rows.where(rows >= worst, 0), (0, 1))
        boxes, labels = multiclass_nms(outputs['boxes'][0], rows, settings['score_threshold'],
                                       dict(type='nms', iou_threshold=settings['iou_threshold']),
                                       settings['max_detections'])
        boxes, scores = boxes[:, :4], boxes[:, 4]
    (height, width), (rows, columns) = prepared.content, prepared.original
    limit = boxes.new_tensor([width, height, width, height])
    scale = boxes.new_tensor([columns / width, rows / height] * 2)
    return InstanceData(bboxes=boxes.clamp(min=0).minimum(limit) * scale, scores=scores, labels=labels)


def segments(logits: Tensor, resize: Dict[str, Any], prepared: PreparedImage) -> Tensor:
    """Return the class of each pixel of the image file, (H, W), as MMSegmentation does."""
    (height, width), mode = prepared.content, dict(mode='bilinear', align_corners=resize['align_corners'])
    logits = F.interpolate(logits, prepared.images.shape[2:], **mode)[..., :height, :width]
    return F.interpolate(logits, prepared.original, **mode)[0].argmax(0)
