"""What MMSegmentation lacks of the MobileViTv2 authors' segmenters: two heads, and logits that are resized once.

MMSegmentation's own heads are other networks, whatever their arguments: its ASPPHead joins the branches by a 3 x 3
convolution where DeepLabv3 has a 1 x 1, and the branches of its PSPHead are each as wide as the head's output.
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


@MODELS.register_module()
class SingleResizeEncoderDecoder(EncoderDecoder):
    """MMSegmentation's EncoderDecoder, with logits that go from the head to the picture's size in one interpolation.

    EncoderDecoder first resizes them to the network's input and then to the picture, which blurs twice. Sliding windows
    and inputs that the preprocessor has padded need the input's size in between and are resized as there.
    """

    def predict(self, inputs: Tensor, data_samples: Optional[List[SegDataSample]] = None) -> List[SegDataSample]:
        """As EncoderDecoder's; images whose pictures differ in size are run one after the other.

        Args:
            inputs: (B, C, H, W).
            data_samples: of each image, with `ori_shape`, the picture's height and width; None for that of `inputs`.

        Returns:
            For each image its data sample, with `seg_logits` and `pred_sem_seg` of the picture's size.
        """
        if len({tuple(sample.ori_shape) for sample in data_samples or ()}) <= 1:
            return super().predict(inputs, data_samples)
        results: List[SegDataSample] = []
        for number, sample in enumerate(data_samples):
            results += super().predict(inputs[number:number + 1], [sample])
        return results

    def whole_inference(self, inputs: Tensor, batch_img_metas: List[Dict[str, Any]]) -> Tensor:
        """Logits of whole images (B, C, H, W) at the pictures' size, (B, classes, *ori_shape)."""
        if not any(any(meta.get('img_padding_size', meta.get('padding_size', ()))) for meta in batch_img_metas):
            # The heads resize to an `img_shape` that is a torch.Size whatever the image was padded to.
            batch_img_metas = [dict(meta, img_shape=torch.Size(meta['ori_shape'])) for meta in batch_img_metas]
        return super().whole_inference(inputs, batch_img_metas)
