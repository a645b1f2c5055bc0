"""Image transforms of the MobileViTv2 authors' segmenters: resizing for evaluation, and two augmentations."""
from typing import Any, Dict

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from mmcv.transforms import BaseTransform, Resize
from mmengine.registry import TRANSFORMS


@TRANSFORMS.register_module()
class ResizeShortSide(Resize):
    """Resize `img` (H, W, C) and, if present, `gt_seg_map` to a given short side, keeping the aspect ratio.

    The long side is rounded down and has no limit. MMSegmentation's Resize rounds to the nearest number and limits each
    side.

    Args:
        size: the short side in pixels.
        kwargs: arguments of mmcv's Resize: `interpolation` ('bilinear' by default) and `backend` ('cv2' by default).
    """

    def __init__(self, size: int, **kwargs: Any):
        super().__init__(scale=size, keep_ratio=False, **kwargs)
        self.size = size

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        height, width = results['img'].shape[:2]
        short = min(height, width)
        results['scale'] = (self.size * width // short, self.size * height // short)
        self._resize_img(results)
        self._resize_seg(results)
        return results


@TRANSFORMS.register_module()
class ResizeToStride(BaseTransform):
    """Resize `img` (H, W, C) down to multiples of a network's output stride.

    The interpolation is bilinear with aligned corners, and the result is float32. An image whose sides are already
    multiples is not changed. MMSegmentation's ResizeToMultiple resizes up to the next multiple, in uint8 and without
    aligned corners.

    Args:
        stride: both sides become multiples of it, and are at least one stride long.

    Raises:
        ValueError: when called, if a label map has already been loaded.
    """

    def __init__(self, stride: int):
        self.stride = stride

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        if results.get('gt_seg_map') is not None:
            raise ValueError('ResizeToStride does not resize label maps; put LoadAnnotations after it in the pipeline')
        image = results['img']
        size = tuple(max(n // self.stride, 1) * self.stride for n in image.shape[:2])
        if size == image.shape[:2]:
            return results
        planes = torch.from_numpy(np.atleast_3d(image).astype(np.float32)).permute(2, 0, 1)        # C, H, W
        planes = F.interpolate(planes[None], size, mode='bilinear', align_corners=True)[0]
        results['img'] = planes.permute(1, 2, 0).reshape(size + image.shape[2:]).numpy()
        before = results.get('ori_shape', image.shape)
        results['img_shape'], results['scale_factor'] = size, (size[1] / before[1], size[0] / before[0])
        return results


@TRANSFORMS.register_module()
class RandomGaussianBlur(BaseTransform):
    """Blur `img` (H, W, C) by a Gaussian with probability `prob`.

    The standard deviation is uniform between 0 and `max_sigma` pixels.
    """

    def __init__(self, prob: float = 0.5, max_sigma: float = 1.0):
        self.prob, self.max_sigma = prob, max_sigma

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        if np.random.rand() < self.prob:
            sigma = max(np.random.uniform(0, self.max_sigma), 1e-3)         # cv2 does not accept 0
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
