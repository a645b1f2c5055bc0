"""SSDLite as the authors of MobileViTv2 have it (their library cvnets): Table 4 of the paper's detectors.

`SSDLiteExtraLayers` makes the levels beyond stride 32, `SSDLiteJointHead` predicts boxes and classes from one layer a
level, `SSDLiteAnchorGenerator` and `SSDLiteBoxCoder` say what its numbers mean. MMDetection's own SSDHead has a branch
for boxes and one for classes, no projections, other anchors, and cuts box sizes; it cannot hold the authors' weights.
"""
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from mmcv.cnn import ConvModule, DepthwiseSeparableConvModule
from mmcv.ops import batched_nms
from mmdet.models.dense_heads import SSDHead
from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder
from mmdet.structures.bbox import HorizontalBoxes, get_box_tensor
from mmengine.model import BaseModule
from mmengine.registry import MODELS, TASK_UTILS
from mmengine.structures import InstanceData
from torch import Tensor, nn

__all__ = ['SSDLiteAnchorGenerator', 'SSDLiteBoxCoder', 'SSDLiteExtraLayers', 'SSDLiteJointHead']

Size = Tuple[int, int]
ConvCfg = Optional[Dict[str, Any]]
# Channels of the levels as the head takes them, and (width, height) ratios of their anchors.
CHANNELS = (512, 256, 256, 128, 128, 64)
RATIOS = ((2, 3), (2, 3), (2, 3), (2, 3), (2, 3), (2,))
# As the authors'; biases start at 0.
INIT = dict(type='Xavier', layer='Conv2d', distribution='uniform', bias=0)


@MODELS.register_module()
class SSDLiteExtraLayers(BaseModule):
    """Levels after the backbone's, each made from the one before; the last is one cell for the whole image.

    A level is a depthwise 3 x 3 at stride 2 with BatchNorm, then 1 x 1, BatchNorm and ReLU; the last one is the global
    average, then 1 x 1 without bias or norm and ReLU.

    Args:
        in_channels: of the backbone's levels, strides 16 and 32; they are passed on as they come.
        out_channels: of the new levels, strides 64, 128, 256 and the whole image.
        norm_cfg: None for BatchNorm.
        init_cfg: None for the authors': Xavier, uniform.

    Raises:
        ValueError: no levels to start from or none to make.
    """

    def __init__(self, in_channels: Sequence[int], out_channels: Sequence[int] = CHANNELS[2:], norm_cfg: ConvCfg = None,
                 init_cfg: Optional[Dict[str, Any]] = None):
        super().__init__(init_cfg or INIT)
        for name, channels in (('in_channels', in_channels), ('out_channels', out_channels)):
            _check_channels(name, channels)
        norm_cfg = norm_cfg or dict(type='BN')
        widths = [in_channels[-1], *out_channels]
        self.num_inputs = len(in_channels)
        self.extra_layers = nn.ModuleList(
            DepthwiseSeparableConvModule(before, after, 3, stride=2, padding=1, norm_cfg=norm_cfg, dw_act_cfg=None)
            for before, after in zip(widths, widths[1:-1]))
        self.extra_layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvModule(*widths[-2:], 1, bias=False)))

    def forward(self, inputs: Sequence[Tensor]) -> Tuple[Tensor, ...]:
        """Maps (B, C, H, W) of the backbone -> the same and a map for each new level, the last (B, C, 1, 1)."""
        if len(inputs) != self.num_inputs:
            raise ValueError(f'the backbone must return {self.num_inputs} levels, got {len(inputs)}')
        levels = list(inputs)
        for layer in self.extra_layers:
            levels.append(layer(levels[-1]))
        return tuple(levels)


@TASK_UTILS.register_module()
class SSDLiteAnchorGenerator:
    """The authors' anchors: fractions of the image, around the centres of the cells of the maps as they are.

    Level i of n has, in each cell, a small square of side s_i, a big one of sqrt(s_i * s_(i+1)), and for every ratio r
    a wide (s_i * sqrt(r), s_i / sqrt(r)) and a tall box; s_0 ... s_n rise evenly over `scale_range`. No side is longer
    than the image, while boxes may reach beyond it.

    Nothing here depends on strides or on the size of training: `grid_priors` takes the network's input size beside the
    maps' sizes, where MMDetection's generators take the latter only, and the head gives it both. So a detector trained
    at 320 works at 288 (where the encoder rounds its 9 x 9 up to 10 x 10), 384 or 320 x 256.

    Args:
        ratios: for each level.
        scale_range: of the small square of the first level, and of what follows the last level.

    Raises:
        ValueError: no levels, ratios or scales that are not positive, or falling scales.
    """

    def __init__(self, ratios: Sequence[Sequence[float]] = RATIOS, scale_range: Tuple[float, float] = (0.1, 1.05)):
        if not ratios or not all(ratio > 0 for level in ratios for ratio in level):
            raise ValueError(f'ratios must be positive numbers, in a sequence for each level, got {ratios!r}')
        if len(scale_range) != 2 or not 0 < scale_range[0] < scale_range[1]:
            raise ValueError(f'scale_range must be two positive, rising numbers, got {scale_range!r}')
        scales = np.linspace(*scale_range, len(ratios) + 1)
        self.sizes: List[Tensor] = []                                       # (A, 2): width, height; float64
        for small, after, level in zip(scales, scales[1:], ratios):
            big = (small * after) ** 0.5
            boxes = [(small, small), (big, big)]
            for root in (ratio ** 0.5 for ratio in level):
                boxes += [(small * root, small / root), (small / root, small * root)]
            self.sizes.append(torch.tensor(boxes, dtype=torch.float64).clamp(max=1))

    @property
    def num_levels(self) -> int:
        return len(self.sizes)

    @property
    def num_base_priors(self) -> List[int]:
        """Anchors in a cell, for each level."""
        return [len(sizes) for sizes in self.sizes]

    def fractions(self, featmap_size: Size, level: int) -> Tensor:
        """Anchors of one level as the authors have them.

        Args:
            featmap_size: height and width of its map.
            level: which.

        Returns:
            (H * W * A, 4), float64: centre x, y, width, height as fractions of the image. Rows go by y, x, anchor.
        """
        height, width = featmap_size
        y = (torch.arange(height, dtype=torch.float64) + 0.5) / height
        x = (torch.arange(width, dtype=torch.float64) + 0.5) / width
        centres = torch.stack((x.expand(height, width), y[:, None].expand(height, width)), -1)   # H, W, 2
        sizes = self.sizes[level]
        shape = (height, width, len(sizes), 2)
        return torch.cat((centres[:, :, None].expand(shape), sizes.expand(shape)), -1).flatten(0, 2)

    def grid_priors(self, featmap_sizes: Sequence[Size], image_size: Size, dtype: torch.dtype = torch.float32,
                    device: Union[str, torch.device] = 'cpu') -> List[Tensor]:
        """Anchors of all levels in pixels.

        Args:
            featmap_sizes: height and width of each level's map.
            image_size: height and width of what the network was given, padding included.
            dtype, device: of the result.

        Returns:
            For each level (H * W * A, 4): x1, y1, x2, y2, not cut at the image's border.

        Raises:
            ValueError: another number of maps than of levels.
        """
        if len(featmap_sizes) != self.num_levels:
            raise ValueError(f'featmap_sizes must be of {self.num_levels} levels, got {len(featmap_sizes)}')
        scale = torch.tensor([image_size[1], image_size[0]], dtype=torch.float64)
        priors = []
        for level, size in enumerate(featmap_sizes):
            centre, extent = self.fractions(size, level).split(2, -1)
            corners = torch.cat(((centre - extent / 2) * scale, (centre + extent / 2) * scale), -1)
            priors.append(corners.to(device=device, dtype=dtype))
        return priors


@TASK_UTILS.register_module()
class SSDLiteBoxCoder(DeltaXYWHBBoxCoder):
    """Boxes from anchors: centre + 0.1 * t_xy * size, size * exp(0.2 * t_wh). MMDetection's coder with SSD's variances,
    but for the limit that it has on t_wh.

    Args:
        target_stds: the two variances, for x, y, width and height.
        kwargs: as MMDetection's.
    """

    def __init__(self, target_stds: Sequence[float] = (0.1, 0.1, 0.2, 0.2), **kwargs: Any):
        super().__init__(target_stds=target_stds, **kwargs)

    def decode(self, bboxes: Any, pred_bboxes: Tensor, max_shape: Optional[Size] = None, **kwargs: Any) -> Any:
        """Boxes of predictions.

        Args:
            bboxes: anchors (..., 4): x1, y1, x2, y2.
            pred_bboxes: (..., 4).
            max_shape: height and width to cut the boxes at; None for not at all.
            kwargs: of MMDetection's coders; not used.

        Returns:
            (..., 4): x1, y1, x2, y2.
        """
        anchors = get_box_tensor(bboxes)
        extent = anchors[..., 2:] - anchors[..., :2]
        deltas = pred_bboxes * pred_bboxes.new_tensor(self.stds) + pred_bboxes.new_tensor(self.means)
        centre = (anchors[..., :2] + anchors[..., 2:]) / 2 + deltas[..., :2] * extent
        half = extent * deltas[..., 2:].exp() / 2
        boxes = torch.cat((centre - half, centre + half), -1)
        if self.clip_border and max_shape is not None:
            boxes = _cut(boxes, max_shape)
        return HorizontalBoxes(boxes) if self.use_box_type else boxes


class _Level(nn.Module):
    """Projection where the head is of another width, then the joint layer: (B, C, H, W) -> (B, C', H, W)."""

    def __init__(self, in_channels: int, channels: int, out_channels: int, last: bool, norm_cfg: Dict[str, Any]):
        super().__init__()
        self.projection = nn.Identity()
        if last:
            self.joint = ConvModule(in_channels, out_channels, 1, act_cfg=None)
            return
        if in_channels != channels:
            self.projection = ConvModule(in_channels, channels, 1, norm_cfg=norm_cfg)
        self.joint = DepthwiseSeparableConvModule(channels, out_channels, 3, padding=1, dw_norm_cfg=norm_cfg,
                                                  dw_act_cfg=None, pw_act_cfg=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.joint(self.projection(x))


@MODELS.register_module()
class SSDLiteJointHead(SSDHead):
    """The authors' SSDLite head: a depthwise 3 x 3 with BatchNorm and a 1 x 1 that give a level's boxes and classes.

    The last level, one cell, has a 1 x 1 only. The 1 x 1's channels are the authors', so that their weights fit: for
    each anchor 4 of the box, 1 of the background, `num_classes` of the classes. `forward` puts them as MMDetection's
    SSDHead has them, background last; targets and losses are that head's (matching from IoU 0.5, three negatives for
    each positive of an image, smooth L1 and cross-entropy), divided by the number of positives of the batch.

    Prediction is the authors': softmax, for each class the `nms_pre` best of those above `score_thr`, NMS by class on
    boxes that are not yet cut at the border, the `max_per_img` best.

    Args:
        num_classes: without the background.
        in_channels: of each level.
        feat_channels: of each level in the head; a 1 x 1 with BatchNorm and ReLU leads there from other `in_channels`.
            The last level has none and does not use its number.
        norm_cfg: None for BatchNorm.
        anchor_generator, bbox_coder: None for the authors'.
        train_cfg, test_cfg: as SSDHead's.
        init_cfg: None for the authors': Xavier, uniform.

    Raises:
        ValueError: num_classes below 1, or channels for another number of levels than there are anchors for.
    """

    def __init__(self, num_classes: int = 80, in_channels: Sequence[int] = CHANNELS,
                 feat_channels: Sequence[int] = CHANNELS, norm_cfg: ConvCfg = None, anchor_generator: ConvCfg = None,
                 bbox_coder: ConvCfg = None, train_cfg: ConvCfg = None, test_cfg: ConvCfg = None,
                 init_cfg: Optional[Dict[str, Any]] = None):
        if not isinstance(num_classes, int) or num_classes < 1:
            raise ValueError(f'num_classes must be an integer of at least 1, got {num_classes!r}')
        super().__init__(num_classes, in_channels, feat_channels=feat_channels, norm_cfg=norm_cfg or dict(type='BN'),
                         anchor_generator=anchor_generator or dict(type='SSDLiteAnchorGenerator'),
                         bbox_coder=bbox_coder or dict(type='SSDLiteBoxCoder'), train_cfg=train_cfg, test_cfg=test_cfg,
                         init_cfg=init_cfg or INIT)

    def _init_layers(self) -> None:
        count = self.prior_generator.num_levels
        for name, channels in (('in_channels', self.in_channels), ('feat_channels', self.feat_channels)):
            _check_channels(name, channels)
            if len(channels) != count:
                raise ValueError(f'{name} must be of {count} levels, as the anchors are, got {len(channels)}')
        self.levels = nn.ModuleList(
            _Level(before, channels, anchors * (5 + self.num_classes), n == count - 1, self.norm_cfg)
            for n, (before, channels, anchors) in enumerate(zip(self.in_channels, self.feat_channels,
                                                                self.num_base_priors)))

    def forward(self, x: Sequence[Tensor]) -> Tuple[List[Tensor], List[Tensor]]:
        """Logits and box codes.

        Args:
            x: a map (B, C, H, W) for each level.

        Returns:
            For each level logits (B, A * (num_classes + 1), H, W), of each anchor the classes' and then the
            background's, and codes (B, A * 4, H, W): t_x, t_y, t_w, t_h.
        """
        if len(x) != len(self.levels):
            raise ValueError(f'the head has {len(self.levels)} levels, got {len(x)} maps')
        scores, codes = [], []
        for level, anchors, features in zip(self.levels, self.num_base_priors, x):
            joint = level(features).unflatten(1, (anchors, -1))             # B, A, 4 + 1 + num_classes, H, W
            code, background, classes = joint.split((4, 1, self.num_classes), 2)
            scores.append(torch.cat((classes, background), 2).flatten(1, 2))
            codes.append(code.flatten(1, 2))
        return scores, codes

    def get_anchors(self, featmap_sizes: Sequence[Size], batch_img_metas: Sequence[Dict[str, Any]],
                    device: Union[str, torch.device] = 'cpu') -> Tuple[List[List[Tensor]], List[List[Tensor]]]:
        """The same anchors for every image of a batch, as lists of levels, and flags that all are to be used."""
        priors = self.prior_generator.grid_priors(featmap_sizes, _input_size(batch_img_metas[0]), device=device)
        flags = [torch.ones(len(level), dtype=torch.bool, device=device) for level in priors]
        return [priors] * len(batch_img_metas), [flags] * len(batch_img_metas)

    def get_targets(self, *args: Any, **kwargs: Any) -> Tuple[Any, ...]:
        """SSDHead's, with the number of positives in the batch, at least 1, to divide by: SSDHead counts an image
        without objects as one positive."""
        labels, *targets = super().get_targets(*args, **kwargs)
        positives = sum((level != self.num_classes).sum() for level in labels)
        targets[3] = max(1, int(positives))
        return (labels, *targets)

    def predict_by_feat(self, cls_scores: List[Tensor], bbox_preds: List[Tensor],
                        score_factors: Optional[List[Tensor]] = None,
                        batch_img_metas: Optional[List[Dict[str, Any]]] = None, cfg: ConvCfg = None,
                        rescale: bool = False, with_nms: bool = True) -> List[InstanceData]:
        """Detections from what `forward` returns.

        Args:
            cls_scores, bbox_preds: see `forward`.
            score_factors: of other heads; must be None.
            batch_img_metas: of each image `batch_input_shape` (or `pad_shape`), `img_shape` and, to rescale,
                `scale_factor`.
            cfg: None for `test_cfg`: score_thr, nms_pre (of each class), nms, max_per_img.
            rescale: boxes in pixels of the image as it was read.
            with_nms: otherwise all candidates, those that are the best of their class first.

        Returns:
            For each image bboxes (N, 4): x1, y1, x2, y2, cut at its border, scores (N,) and labels (N,), best first.
        """
        cfg = self.test_cfg if cfg is None else cfg
        sizes = [level.shape[-2:] for level in cls_scores]
        size = _input_size(batch_img_metas[0])
        # Half precision is too coarse for pixels.
        priors = torch.cat(self.prior_generator.grid_priors(sizes, size, device=cls_scores[0].device))
        scores = _rows(cls_scores, self.cls_out_channels).softmax(-1)[..., :-1]
        boxes = get_box_tensor(self.bbox_coder.decode(priors, _rows(bbox_preds, 4)))
        results = []
        for image, meta in enumerate(batch_img_metas):
            found = _candidates(boxes[image], scores[image], cfg.get('score_thr', 0), cfg.get('nms_pre', -1))
            if with_nms and len(found):
                _, keep = batched_nms(_within_reach(found.bboxes, size), found.scores, found.labels, cfg['nms'])
                found = found[keep[:cfg.get('max_per_img', len(found))]]
            found.bboxes = _cut(found.bboxes, meta['img_shape'])
            if rescale:
                found.bboxes = found.bboxes / found.bboxes.new_tensor(meta['scale_factor']).repeat(2)
            results.append(found)
        return results


def _check_channels(name: str, channels: Sequence[int]) -> None:
    """Raises ValueError unless they are positive integers, one at least."""
    if isinstance(channels, int) or not channels or not all(isinstance(c, int) and c > 0 for c in channels):
        raise ValueError(f'{name} must be positive integers, one for each level, got {channels!r}')


def _input_size(meta: Dict[str, Any]) -> Size:
    """Height and width of what the network was given: all images of a batch are padded to one size."""
    return tuple(meta['batch_input_shape' if 'batch_input_shape' in meta else 'pad_shape'][:2])


def _rows(levels: Sequence[Tensor], width: int) -> Tensor:
    """Maps (B, A * width, H, W) -> (B, anchors of all levels, width) in float32, in the anchors' order."""
    return torch.cat([level.detach().permute(0, 2, 3, 1).reshape(len(level), -1, width) for level in levels], 1).float()


def _candidates(boxes: Tensor, scores: Tensor, threshold: float, count: int) -> InstanceData:
    """Of boxes (N, 4) with scores (N, classes), the `count` best (-1: all) of each class, if above the threshold."""
    best, index = scores.topk(min(count, len(scores)) if count > 0 else len(scores), dim=0)
    row, label = (best > threshold).nonzero(as_tuple=True)
    return InstanceData(bboxes=boxes[index[row, label]], scores=best[row, label], labels=label)


def _within_reach(boxes: Tensor, size: Size) -> Tensor:
    """Boxes as class-wise NMS needs them, which parts the classes by moving each beyond the largest coordinate of the
    one before: none below 0, none so far away that float32 loses pixels. Within four images of the image IoUs are
    kept."""
    reach = 4 * max(size)
    boxes = boxes.clamp(-reach, reach + max(size))
    return boxes - boxes.min()


def _cut(boxes: Tensor, shape: Sequence[int]) -> Tensor:
    """Boxes (..., 4) cut at the border of an image of this height and width."""
    height, width = shape[:2]
    return boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))
