"""Test a classifier on several views of each image, and on some of its classes only."""
from functools import partial
from typing import Any, List, Optional, Sequence

import torch
from torch import Tensor, nn
from torchvision import transforms

from ...common.cli import UserError


def _with_mirror_image(view: Tensor) -> Tensor:
    """Return an image (C, H, W) and its mirror image: (2, C, H, W)."""
    return torch.stack([view, view.flip(-1)])


def _transformed(crops: Sequence[Any], transform: Any) -> Tensor:
    """Return the transformed crops: (5, C, H, W) or (10, C, H, W)."""
    return torch.stack([transform(crop) for crop in crops])


def view_transform(transform: Any, mode: str, crop_pct: Optional[float]) -> Any:
    """Return a transform that gives all views of an image, (views, C, H, W).

    Args:
        transform: timm's transform for evaluation, which resizes an image and crops its center.
        mode: 'flip' (the image and its mirror image), 'five-crop' (corners and center of the resized image, each of the
            size of the center crop) or 'ten-crop' (these and their mirror images).
        crop_pct: The share of the resized image that the center crop keeps.
    """
    if mode == 'flip':
        return transforms.Compose([transform, _with_mirror_image])
    steps: List[Any] = list(getattr(transform, 'transforms', ()))
    place = next((n for n, step in enumerate(steps) if isinstance(step, transforms.CenterCrop)), None)
    if place is None:
        raise UserError(f'--tta {mode} needs a test transform with a center crop')
    if crop_pct and crop_pct >= 1:
        raise UserError(f'--tta {mode}: the crops would be equal, because the test transform has '
                        f'crop_pct={crop_pct:g}; set --cfg-options test_dataloader.dataset.transform.crop_pct=0.875, '
                        'or take --tta flip')
    crop = (transforms.FiveCrop if mode == 'five-crop' else transforms.TenCrop)(steps[place].size)
    after = partial(_transformed, transform=transforms.Compose(steps[place + 1:]))
    return transforms.Compose([*steps[:place], crop, after])


class EvaluatedNet(nn.Module):
    """A classifier that averages the probabilities of several views and chooses from some of its classes.

    Its output are logarithms of probabilities (B, num_classes), in float32: -inf for classes that are not chosen from,
    and NaN for an image with any score that is NaN or infinite.

    Args:
        net: The classifier, of images (B, C, H, W).
        views: Whether the input has several views of each image, (B, views, C, H, W).
        valid: Indices of the classes to choose from, or None for all.
    """

    def __init__(self, net: nn.Module, views: bool, valid: Optional[Sequence[int]]):
        super().__init__()
        self.net, self.views, self.valid = net, views, valid

    def forward(self, images: Tensor) -> Tensor:
        logits = self.net(images.flatten(0, 1) if self.views else images).float()
        finite = logits.isfinite().all(-1, keepdim=True)
        if self.valid is not None:
            others = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
            others[torch.as_tensor(self.valid, device=logits.device)] = False
            logits = logits.masked_fill(others, -torch.inf)
        scores = logits.softmax(-1).where(finite, torch.nan)
        if self.views:
            scores = scores.unflatten(0, images.shape[:2]).mean(1)          # (B, views, n) -> (B, n)
        return scores.log()
