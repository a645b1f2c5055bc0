"""DeepLabv3 and PSPNet heads of the MobileViTv2 authors, and a segmenter that resizes its logits once.

MMSegmentation's own heads are different networks. Its ASPPHead joins the branches by a 3 x 3 convolution, where
DeepLabv3 has a 1 x 1. The branches of its PSPHead are each as wide as the output of the head.
"""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmengine.registry import MODELS
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.models.segmentors import EncoderDecoder
from mmseg.structures import SegDataSample
from torch import Tensor, nn

Maps = Sequence[Tensor]


class _Head(BaseDecodeHead):
    """Base class of the two heads: takes one map and returns logits of the same size.

    The branches that pool to 1 x 1 normalize one value per image, so in training BatchNorm raises ValueError for a
    total batch of one image.

    Args:
        in_channels: channels of the map.
        channels: input channels of the classifier.
        norm_cfg: config of the norm layers; BatchNorm by default.
        align_corners: how the logits are interpolated to the size of the image.
        kwargs: arguments of BaseDecodeHead: num_classes (required), in_index, dropout_ratio (of the Dropout2d before
            the classifier), loss_decode, ...
    """

    def __init__(self, in_channels: int, channels: int = 512, *, norm_cfg: Optional[Dict[str, Any]] = None,
                 align_corners: bool = True, **kwargs: Any):
        super().__init__(in_channels, channels, norm_cfg=norm_cfg or dict(type='BN'), align_corners=align_corners,
                         **kwargs)

    def _unit(self, in_channels: int, channels: int, kernel_size: int = 1, dilation: int = 1) -> ConvModule:
        """Build a convolution without bias that keeps the size, followed by norm and ReLU."""
        return ConvModule(in_channels, channels, kernel_size, padding=kernel_size // 2 * dilation, dilation=dilation,
                          bias=False, conv_cfg=self.conv_cfg, norm_cfg=self.norm_cfg, act_cfg=self.act_cfg)

    def forward(self, inputs: Maps) -> Tensor:
        """Return the logits (B, classes, H, W) of the map (B, in_channels, H, W) that `in_index` selects."""
        return self.cls_seg(self._forward_feature(inputs))


@MODELS.register_module()
class DeepLabv3Head(_Head):
    """DeepLabv3 head: five parallel branches, joined by a 1 x 1 convolution.

    The branches are a 1 x 1 convolution, three dilated 3 x 3 convolutions and the mean of the image. Each is `channels`
    wide, with BatchNorm and ReLU, as in the MobileViTv2 authors' library. Chen et al., "Rethinking Atrous Convolution
    for Semantic Image Segmentation", 2017, arXiv 1706.05587.

    Args:
        dilations: of the three 3 x 3 convolutions: (12, 24, 36) for stride 8, (6, 12, 18) for stride 16.
        kwargs: see `_Head`.
    """

    def __init__(self, dilations: Tuple[int, int, int] = (12, 24, 36), **kwargs: Any):
        super().__init__(**kwargs)
        self.dilations = tuple(dilations)
        self.aspp = nn.ModuleList([
            self._unit(self.in_channels, self.channels),
            *(self._unit(self.in_channels, self.channels, 3, d) for d in self.dilations),
            self._unit(self.in_channels, self.channels)])                               # for the mean of the image
        self.project = self._unit(len(self.aspp) * self.channels, self.channels)

    def _forward_feature(self, inputs: Maps) -> Tensor:
        x = self._transform_inputs(inputs)
        *local, pooled = self.aspp
        image = self.spread(pooled(F.adaptive_avg_pool2d(x, 1)), x.shape[2:])
        return self.project(torch.cat([*(unit(x) for unit in local), image], dim=1))

    def spread(self, image: Tensor, size: torch.Size) -> Tensor:
        """Repeat (B, C, 1, 1) for every place: (B, C, *size)."""
        return image.expand(-1, -1, *size)


class ExportDeepLabv3Head(DeepLabv3Head):
    """DeepLabv3Head for exporters: the same values, by an operator that LiteRT can take and ExecuTorch delegates."""

    def spread(self, image: Tensor, size: torch.Size) -> Tensor:
        return F.interpolate(image, size, mode='bilinear', align_corners=True)


DeepLabv3Head.export_form = ExportDeepLabv3Head


@MODELS.register_module()
class PSPNetHead(_Head):
    """PSPNet head: the map and its means over grids of 1, 2, 3 and 6 cells per side, joined by a 3 x 3 convolution.

    Zhao et al., "Pyramid Scene Parsing Network", CVPR 2017, arXiv 1612.01105, as in the MobileViTv2 authors' library.
    Each branch has in_channels / branches channels, rounded down to a multiple of 16 (at least 16). The branches are
    always interpolated with aligned corners; `align_corners` applies to the logits only.

    Args:
        pool_scales: the number of cells per side, for each branch.
        kwargs: see `_Head`.
    """

    def __init__(self, pool_scales: Sequence[int] = (1, 2, 3, 6), **kwargs: Any):
        super().__init__(**kwargs)
        self.pool_scales = tuple(pool_scales)
        self.pools = nn.ModuleList(nn.AdaptiveAvgPool2d(cells) for cells in self.pool_scales)
        width = max(self.in_channels // len(self.pool_scales) // 16, 1) * 16
        self.branches = nn.ModuleList(self._unit(self.in_channels, width) for _ in self.pool_scales)
        self.fusion = self._unit(self.in_channels + width * len(self.pool_scales), self.channels, 3)

    def _forward_feature(self, inputs: Maps) -> Tensor:
        x = self._transform_inputs(inputs)
        levels: List[Tensor] = [x]
        for pool, unit in zip(self.pools, self.branches):
            y = unit(pool(x))                                                           # (B, C', cells, cells)
            levels.append(F.interpolate(y, x.shape[2:], mode='bilinear', align_corners=True))
        return self.fusion(torch.cat(levels, dim=1))


@MODELS.register_module()
class SingleResizeEncoderDecoder(EncoderDecoder):
    """EncoderDecoder of MMSegmentation that resizes the logits once, directly to the original size.

    EncoderDecoder resizes the logits to the input size and then to the original size, which blurs them twice.
    Sliding windows and padded inputs need the input size in between, so they are resized as in EncoderDecoder.
    """

    def predict(self, inputs: Tensor, data_samples: Optional[List[SegDataSample]] = None) -> List[SegDataSample]:
        """Segment a batch of images. Images whose original sizes (`ori_shape`) differ are processed one by one.

        Args:
            inputs: images (B, C, H, W).
            data_samples: one data sample for each image; its `ori_shape` is the original height and width. With None
                the original size is that of `inputs`.

        Returns:
            The data samples, with `seg_logits` and `pred_sem_seg` in the original size.
        """
        if len({tuple(sample.ori_shape) for sample in data_samples or ()}) <= 1:
            return super().predict(inputs, data_samples)
        results: List[SegDataSample] = []
        for number, sample in enumerate(data_samples):
            results += super().predict(inputs[number:number + 1], [sample])
        return results

    def whole_inference(self, inputs: Tensor, batch_img_metas: List[Dict[str, Any]]) -> Tensor:
        """Return the logits (B, classes, *ori_shape) of whole images (B, C, H, W)."""
        if not any(any(meta.get('img_padding_size', meta.get('padding_size', ()))) for meta in batch_img_metas):
            # If `img_shape` is a torch.Size, the heads resize to it and ignore the padded size.
            batch_img_metas = [dict(meta, img_shape=torch.Size(meta['ori_shape'])) for meta in batch_img_metas]
        return super().whole_inference(inputs, batch_img_metas)
