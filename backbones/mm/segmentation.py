"""What MMSegmentation lacks of the MobileViTv2 authors' segmenters: two heads and two augmentations.

MMSegmentation's own heads are other networks, whatever their arguments: its ASPPHead joins the branches by a 3 x 3
convolution where DeepLabv3 has a 1 x 1, and the branches of its PSPHead are each as wide as the head's output.
"""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmcv.transforms import BaseTransform
from mmengine.registry import MODELS, TRANSFORMS
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from torch import Tensor, nn

Maps = Sequence[Tensor]


class _Head(BaseDecodeHead):
    """Base of the two: one input map, of stride s; logits at the same stride.

    In training the branches that pool to 1 x 1 normalise one value an image, so that a batch of a single image, on all
    GPUs together, raises ValueError in BatchNorm.

    Args:
        in_channels: of the map.
        channels: that the classifier takes.
        norm_cfg: BatchNorm by default.
        align_corners: when the logits are interpolated to the image's size.
        kwargs: of BaseDecodeHead: num_classes (required), in_index, dropout_ratio (of Dropout2d before the classifier),
            loss_decode, ...
    """

    def __init__(self, in_channels: int, channels: int = 512, *, norm_cfg: Optional[Dict[str, Any]] = None,
                 align_corners: bool = True, **kwargs: Any):
        super().__init__(in_channels, channels, norm_cfg=norm_cfg or dict(type='BN'), align_corners=align_corners,
                         **kwargs)

    def _unit(self, in_channels: int, channels: int, kernel_size: int = 1, dilation: int = 1) -> ConvModule:
        """Convolution that keeps the size, without bias, norm, ReLU."""
        return ConvModule(in_channels, channels, kernel_size, padding=kernel_size // 2 * dilation, dilation=dilation,
                          bias=False, conv_cfg=self.conv_cfg, norm_cfg=self.norm_cfg, act_cfg=self.act_cfg)

    def forward(self, inputs: Maps) -> Tensor:
        """Maps of a backbone, of which `in_index` says the one (B, in_channels, H, W) -> logits (B, classes, H, W)."""
        return self.cls_seg(self._forward_feature(inputs))


@MODELS.register_module()
class DeepLabv3Head(_Head):
    """DeepLabv3's head: a 1 x 1 convolution, three dilated 3 x 3 ones and the image's mean, side by side, joined by a
    1 x 1 convolution.

    Chen et al., "Rethinking Atrous Convolution for Semantic Image Segmentation", 2017, arXiv 1706.05587, as in the
    MobileViTv2 authors' library: each `channels` wide, with BatchNorm and ReLU.

    Args:
        dilations: of the three: (12, 24, 36) on a map of stride 8, (6, 12, 18) on one of stride 16.
        kwargs: see `_Head`.
    """

    def __init__(self, dilations: Tuple[int, int, int] = (12, 24, 36), **kwargs: Any):
        super().__init__(**kwargs)
        self.dilations = tuple(dilations)
        self.aspp = nn.ModuleList([
            self._unit(self.in_channels, self.channels),
            *(self._unit(self.in_channels, self.channels, 3, d) for d in self.dilations),
            self._unit(self.in_channels, self.channels)])                               # of the image's mean
        self.project = self._unit(len(self.aspp) * self.channels, self.channels)

    def _forward_feature(self, inputs: Maps) -> Tensor:
        x = self._transform_inputs(inputs)
        *local, pooled = self.aspp
        image = pooled(F.adaptive_avg_pool2d(x, 1)).expand(-1, -1, *x.shape[2:])        # (B, C, 1, 1) -> (B, C, H, W)
        return self.project(torch.cat([*(unit(x) for unit in local), image], dim=1))


@MODELS.register_module()
class PSPNetHead(_Head):
    """PSPNet's head: the map beside its means over grids of 1, 2, 3 and 6 cells a side, joined by a 3 x 3 convolution.

    Zhao et al., "Pyramid Scene Parsing Network", CVPR 2017, arXiv 1612.01105, as in the MobileViTv2 authors' library.
    The branches share in_channels channels evenly, each rounded down to a multiple of 16 (at least 16), and are
    interpolated with aligned corners whatever `align_corners` says.

    Args:
        pool_scales: cells a side, one for each branch.
        kwargs: see `_Head`.
    """

    def __init__(self, pool_scales: Sequence[int] = (1, 2, 3, 6), **kwargs: Any):
        super().__init__(**kwargs)
        self.pool_scales = tuple(pool_scales)
        width = max(self.in_channels // len(self.pool_scales) // 16, 1) * 16
        self.branches = nn.ModuleList(self._unit(self.in_channels, width) for _ in self.pool_scales)
        self.fusion = self._unit(self.in_channels + width * len(self.pool_scales), self.channels, 3)

    def _forward_feature(self, inputs: Maps) -> Tensor:
        x = self._transform_inputs(inputs)
        levels: List[Tensor] = [x]
        for cells, unit in zip(self.pool_scales, self.branches):
            y = unit(F.adaptive_avg_pool2d(x, cells))                                   # (B, C', cells, cells)
            levels.append(F.interpolate(y, x.shape[2:], mode='bilinear', align_corners=True))
        return self.fusion(torch.cat(levels, dim=1))


@TRANSFORMS.register_module()
class RandomGaussianBlur(BaseTransform):
    """Blur `img` (H, W, C), with probability `prob`, by a Gaussian of a standard deviation between 0 and `max_sigma`
    pixels."""

    def __init__(self, prob: float = 0.5, max_sigma: float = 1.0):
        self.prob, self.max_sigma = prob, max_sigma

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        if np.random.rand() < self.prob:
            sigma = max(np.random.uniform(0, self.max_sigma), 1e-3)         # cv2 wants more than 0
            results['img'] = cv2.GaussianBlur(results['img'], (0, 0), sigma)
        return results


@TRANSFORMS.register_module()
class RandomChannelOrder(BaseTransform):
    """Shuffle the channels of `img` (H, W, C) with probability `prob`."""

    def __init__(self, prob: float = 0.5):
        self.prob = prob

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        if np.random.rand() < self.prob:
            order = np.random.permutation(results['img'].shape[-1])
            results['img'] = np.ascontiguousarray(results['img'][..., order])
        return results
