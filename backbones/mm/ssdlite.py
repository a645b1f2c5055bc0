"""SSDLite of the MobileViTv2 authors (their library cvnets), as in Table 4 of the paper.

`SSDLiteExtraLayers` adds the levels beyond stride 32. `SSDLiteJointHead` predicts boxes and classes with one layer per
level. `SSDLiteAnchorGenerator` and `SSDLiteBoxCoder` define its anchors and box codes. MMDetection's SSDHead cannot
load the authors' weights: it has separate branches for boxes and classes, no projections, other anchors, and limits
box sizes.
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
# Input channels of the head for each level, and aspect ratios of the anchors for each level.
CHANNELS = (512, 256, 256, 128, 128, 64)
RATIOS = ((2, 3), (2, 3), (2, 3), (2, 3), (2, 3), (2,))
# The authors' initialization; biases start at 0.
INIT = dict(type='Xavier', layer='Conv2d', distribution='uniform', bias=0)


@MODELS.register_module()
class SSDLiteExtraLayers(BaseModule):
    """Neck that appends levels to those of the backbone, each computed from the level before.

    A level is a depthwise 3 x 3 convolution at stride 2 with BatchNorm, then a 1 x 1 convolution with BatchNorm and
    ReLU. The last level is one cell for the whole image: the global average, then a 1 x 1 convolution without bias or
    norm, and ReLU.

    Args:
        in_channels: channels of the backbone's levels at strides 16 and 32, which are passed on unchanged.
        out_channels: channels of the new levels at strides 64, 128, 256 and of the whole image.
        norm_cfg: config of the norm layers; BatchNorm by default.
        init_cfg: config of the initialization; by default the authors' uniform Xavier initialization.
    """

    def __init__(self, in_channels: Sequence[int], out_channels: Sequence[int] = CHANNELS[2:], norm_cfg: ConvCfg = None,
                 init_cfg: Optional[Dict[str, Any]] = None):
        super().__init__(init_cfg or INIT)
        norm_cfg = norm_cfg or dict(type='BN')
        widths = [in_channels[-1], *out_channels]
        self.extra_layers = nn.ModuleList(
            DepthwiseSeparableConvModule(before, after, 3, stride=2, padding=1, norm_cfg=norm_cfg, dw_act_cfg=None)
            for before, after in zip(widths, widths[1:-1]))
        self.extra_layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvModule(*widths[-2:], 1, bias=False)))

    def forward(self, inputs: Sequence[Tensor]) -> Tuple[Tensor, ...]:
        """Return the maps (B, C, H, W) of the backbone and one map for each new level, the last (B, C, 1, 1)."""
        levels = list(inputs)
        for layer in self.extra_layers:
            levels.append(layer(levels[-1]))
        return tuple(levels)


@TASK_UTILS.register_module()
class SSDLiteAnchorGenerator:
    """Anchor generator of the authors. Anchors are fractions of the image, centered on the cells of the maps.

    Each cell of level i has a small square of side s_i, a large square of side sqrt(s_i * s_(i+1)) and, for each ratio
    r, a wide box (s_i * sqrt(r), s_i / sqrt(r)) and a tall box. s_0 ... s_n rise evenly over `scale_range`. No side is
    longer than the image, but boxes may reach beyond its border.

    Anchors do not depend on strides or on the image size of training: `grid_priors` takes the input size of the
    network in addition to the sizes of the maps, which is all that MMDetection's generators take. So a detector that
    was trained at 320 works at 288 (where the encoder rounds its 9 x 9 map up to 10 x 10), 384 or 320 x 256.

    Args:
        ratios: aspect ratios for each level.
        scale_range: the side of the small square of the first level, and the scale that follows the last level.
    """

    def __init__(self, ratios: Sequence[Sequence[float]] = RATIOS, scale_range: Tuple[float, float] = (0.1, 1.05)):
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
        """The number of anchors per cell, for each level."""
        return [len(sizes) for sizes in self.sizes]

    def fractions(self, featmap_size: Size, level: int) -> Tensor:
        """Return the anchors of one level as fractions of the image.

        Args:
            featmap_size: height and width of the level's map.
            level: the number of the level.

        Returns:
            (H * W * A, 4), float64: center x, center y, width, height. Rows are ordered by y, x and anchor.
        """
        height, width = featmap_size
        y = (torch.arange(height, dtype=torch.float64) + 0.5) / height
        x = (torch.arange(width, dtype=torch.float64) + 0.5) / width
        centers = torch.stack((x.expand(height, width), y[:, None].expand(height, width)), -1)   # H, W, 2
        sizes = self.sizes[level]
        shape = (height, width, len(sizes), 2)
        return torch.cat((centers[:, :, None].expand(shape), sizes.expand(shape)), -1).flatten(0, 2)

    def grid_priors(self, featmap_sizes: Sequence[Size], image_size: Size, dtype: torch.dtype = torch.float32,
                    device: Union[str, torch.device] = 'cpu') -> List[Tensor]:
        """Return the anchors of all levels in pixels.

        Args:
            featmap_sizes: height and width of each level's map.
            image_size: height and width of the network's input, including padding.
            dtype: dtype of the result.
            device: device of the result.

        Returns:
            For each level (H * W * A, 4): x1, y1, x2, y2, not clipped to the image.
        """
        scale = torch.tensor([image_size[1], image_size[0]], dtype=torch.float64)
        priors = []
        for level, size in enumerate(featmap_sizes):
            center, extent = self.fractions(size, level).split(2, -1)
            corners = torch.cat(((center - extent / 2) * scale, (center + extent / 2) * scale), -1)
            priors.append(corners.to(device=device, dtype=dtype))
        return priors


@TASK_UTILS.register_module()
class SSDLiteBoxCoder(DeltaXYWHBBoxCoder):
    """Box coder of SSD: center + 0.1 * t_xy * size, size * exp(0.2 * t_wh).

    It equals MMDetection's coder with SSD's variances, but does not limit t_wh.

    Args:
        target_stds: the variances for x, y, width and height.
        kwargs: arguments of DeltaXYWHBBoxCoder.
    """

    def __init__(self, target_stds: Sequence[float] = (0.1, 0.1, 0.2, 0.2), **kwargs: Any):
        super().__init__(target_stds=target_stds, **kwargs)

    def decode(self, bboxes: Any, pred_bboxes: Tensor, max_shape: Optional[Size] = None, **kwargs: Any) -> Any:
        """Decode box codes to boxes.

        Args:
            bboxes: anchors (..., 4): x1, y1, x2, y2.
            pred_bboxes: box codes (..., 4).
            max_shape: height and width to which the boxes are clipped. None does not clip.
            kwargs: not used; MMDetection's coders take them.

        Returns:
            (..., 4): x1, y1, x2, y2.
        """
        anchors = get_box_tensor(bboxes)
        extent = anchors[..., 2:] - anchors[..., :2]
        deltas = pred_bboxes * pred_bboxes.new_tensor(self.stds) + pred_bboxes.new_tensor(self.means)
        center = (anchors[..., :2] + anchors[..., 2:]) / 2 + deltas[..., :2] * extent
        half = extent * deltas[..., 2:].exp() / 2
        boxes = torch.cat((center - half, center + half), -1)
        if self.clip_border and max_shape is not None:
            boxes = _clip(boxes, max_shape)
        return HorizontalBoxes(boxes) if self.use_box_type else boxes


class _Level(nn.Module):
    """A projection if the head has another width, then the joint layer: (B, C, H, W) -> (B, C', H, W)."""

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
    """SSDLite head of the authors: one depthwise-separable convolution per level predicts boxes and classes.

    The last level is one cell and has a 1 x 1 convolution only. The output channels have the authors' order, so that
    their weights load: for each anchor 4 channels of the box, 1 of the background and `num_classes` of the classes.
    `forward` returns them in the order of MMDetection's SSDHead, with the background last. Targets and losses are those
    of SSDHead (matching from IoU 0.5, three negatives for each positive of an image, smooth L1 and cross-entropy),
    divided by the number of positives in the batch.

    Prediction is the authors': softmax; for each class the `nms_pre` best boxes above `score_thr`; NMS per class on
    boxes that are not yet clipped to the image; the `max_per_img` best boxes.

    Args:
        num_classes: the number of classes without the background.
        in_channels: input channels of each level.
        feat_channels: channels of each level inside the head. A 1 x 1 convolution with BatchNorm and ReLU projects
            other `in_channels` to them. The last level does not use its entry.
        norm_cfg: config of the norm layers; BatchNorm by default.
        anchor_generator: config of the anchors; `SSDLiteAnchorGenerator` by default.
        bbox_coder: config of the box coder; `SSDLiteBoxCoder` by default.
        train_cfg: see SSDHead.
        test_cfg: see SSDHead.
        init_cfg: config of the initialization; by default the authors' uniform Xavier initialization.

    Raises:
        ValueError: the number of channels is not the number of anchor levels.
    """

    def __init__(self, num_classes: int = 80, in_channels: Sequence[int] = CHANNELS,
                 feat_channels: Sequence[int] = CHANNELS, norm_cfg: ConvCfg = None, anchor_generator: ConvCfg = None,
                 bbox_coder: ConvCfg = None, train_cfg: ConvCfg = None, test_cfg: ConvCfg = None,
                 init_cfg: Optional[Dict[str, Any]] = None):
        super().__init__(num_classes, in_channels, feat_channels=feat_channels, norm_cfg=norm_cfg or dict(type='BN'),
                         anchor_generator=anchor_generator or dict(type='SSDLiteAnchorGenerator'),
                         bbox_coder=bbox_coder or dict(type='SSDLiteBoxCoder'), train_cfg=train_cfg, test_cfg=test_cfg,
                         init_cfg=init_cfg or INIT)

    def _init_layers(self) -> None:
        count = self.prior_generator.num_levels
        if not len(self.in_channels) == len(self.feat_channels) == count:
            raise ValueError(f'in_channels and feat_channels must have {count} entries, one for each level of anchors')
        self.levels = nn.ModuleList(
            _Level(before, channels, anchors * (5 + self.num_classes), n == count - 1, self.norm_cfg)
            for n, (before, channels, anchors) in enumerate(zip(self.in_channels, self.feat_channels,
                                                                self.num_base_priors)))

    def forward(self, x: Sequence[Tensor]) -> Tuple[List[Tensor], List[Tensor]]:
        """Compute logits and box codes.

        Args:
            x: one map (B, C, H, W) for each level.

        Returns:
            For each level the logits (B, A * (num_classes + 1), H, W), where the background follows the classes of each
            anchor, and the box codes (B, A * 4, H, W): t_x, t_y, t_w, t_h.
        """
        scores, codes = [], []
        for level, anchors, features in zip(self.levels, self.num_base_priors, x, strict=True):
            joint = level(features).unflatten(1, (anchors, -1))             # B, A, 4 + 1 + num_classes, H, W
            code, background, classes = joint.split((4, 1, self.num_classes), 2)
            scores.append(torch.cat((classes, background), 2).flatten(1, 2))
            codes.append(code.flatten(1, 2))
        return scores, codes

    def get_anchors(self, featmap_sizes: Sequence[Size], batch_img_metas: Sequence[Dict[str, Any]],
                    device: Union[str, torch.device] = 'cpu') -> Tuple[List[List[Tensor]], List[List[Tensor]]]:
        """Return the anchors of each image, as lists of levels, and flags that mark all anchors as valid."""
        priors = self.prior_generator.grid_priors(featmap_sizes, _input_size(batch_img_metas[0]), device=device)
        flags = [torch.ones(len(level), dtype=torch.bool, device=device) for level in priors]
        return [priors] * len(batch_img_metas), [flags] * len(batch_img_metas)

    def get_targets(self, *args: Any, **kwargs: Any) -> Tuple[Any, ...]:
        """Return the targets of SSDHead, but divide by the number of positives in the batch (at least 1).

        SSDHead counts an image without objects as one positive.
        """
        labels, *targets = super().get_targets(*args, **kwargs)
        positives = sum((level != self.num_classes).sum() for level in labels)
        targets[3] = max(1, int(positives))
        return (labels, *targets)

    def predict_by_feat(self, cls_scores: List[Tensor], bbox_preds: List[Tensor],
                        score_factors: Optional[List[Tensor]] = None,
                        batch_img_metas: Optional[List[Dict[str, Any]]] = None, cfg: ConvCfg = None,
                        rescale: bool = False, with_nms: bool = True) -> List[InstanceData]:
        """Compute detections from the outputs of `forward`.

        Args:
            cls_scores: logits of each level; see `forward`.
            bbox_preds: box codes of each level; see `forward`.
            score_factors: not used; other heads of MMDetection take them.
            batch_img_metas: metadata of each image: `batch_input_shape` (or `pad_shape`), `img_shape` and, with
                rescale, `scale_factor`.
            cfg: replaces `test_cfg`: score_thr, nms_pre (per class), nms, max_per_img.
            rescale: return boxes in pixels of the original image.
            with_nms: with False all candidates are returned, the best of each class first.

        Returns:
            For each image bboxes (N, 4): x1, y1, x2, y2, clipped to the image, scores (N,) and labels (N,), in
            descending order of scores.
        """
        cfg = self.test_cfg if cfg is None else cfg
        sizes = [level.shape[-2:] for level in cls_scores]
        size = _input_size(batch_img_metas[0])
        # Anchors are float32, because half precision is too coarse for pixels.
        priors = torch.cat(self.prior_generator.grid_priors(sizes, size, device=cls_scores[0].device))
        scores = _rows(cls_scores, self.cls_out_channels).softmax(-1)[..., :-1]
        boxes = get_box_tensor(self.bbox_coder.decode(priors, _rows(bbox_preds, 4)))
        results = []
        for image, meta in enumerate(batch_img_metas):
            found = _candidates(boxes[image], scores[image], cfg.get('score_thr', 0), cfg.get('nms_pre', -1))
            if with_nms and len(found):
                _, keep = batched_nms(_limit_coordinates(found.bboxes, size), found.scores, found.labels, cfg['nms'])
                found = found[keep[:cfg.get('max_per_img', len(found))]]
            found.bboxes = _clip(found.bboxes, meta['img_shape'])
            if rescale:
                found.bboxes = found.bboxes / found.bboxes.new_tensor(meta['scale_factor']).repeat(2)
            results.append(found)
        return results


def _input_size(meta: Dict[str, Any]) -> Size:
    """Return height and width of the network's input; all images of a batch are padded to this size."""
    return tuple(meta['batch_input_shape' if 'batch_input_shape' in meta else 'pad_shape'][:2])


def _rows(levels: Sequence[Tensor], width: int) -> Tensor:
    """Reorder maps (B, A * width, H, W) of all levels to float32 rows (B, anchors of all levels, width)."""
    return torch.cat([level.detach().permute(0, 2, 3, 1).reshape(len(level), -1, width) for level in levels], 1).float()


def _candidates(boxes: Tensor, scores: Tensor, threshold: float, count: int) -> InstanceData:
    """Select the `count` best (-1: all) boxes (N, 4) of each class with scores (N, classes) above the threshold."""
    best, index = scores.topk(min(count, len(scores)) if count > 0 else len(scores), dim=0)
    row, label = (best > threshold).nonzero(as_tuple=True)
    return InstanceData(bboxes=boxes[index[row, label]], scores=best[row, label], labels=label)


def _limit_coordinates(boxes: Tensor, size: Size) -> Tensor:
    """Limit coordinates for `batched_nms`, which separates classes by adding offsets to the boxes.

    No coordinate is negative, and none is so large that float32 loses pixels. IoUs do not change for boxes within four
    image sizes of the image.
    """
    reach = 4 * max(size)
    boxes = boxes.clamp(-reach, reach + max(size))
    return boxes - boxes.min()


def _clip(boxes: Tensor, shape: Sequence[int]) -> Tensor:
    """Clip boxes (..., 4) to an image of this height and width."""
    height, width = shape[:2]
    return boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))
