"""Copy images to the device as bytes, and normalize and mix them there."""
from collections.abc import Sequence
from typing import Any, Dict, Optional

import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import MODELS
from timm.data import Mixup
from torch import nn

from ...common.cli import UserError


@MODELS.register_module()
class ImagePreprocessor(BaseDataPreprocessor):
    """Moves batches to the device, and normalizes images that arrive as bytes.

    Args:
        non_blocking: Copy batches to the device asynchronously.
    """

    def __init__(self, non_blocking: bool = True):
        super().__init__(non_blocking)
        for part in ('train', 'val'):
            self.register_buffer(f'{part}_table', None, persistent=False)        # (3 * 256,)

    def forward(self, data: Dict[str, Any], training: bool = False) -> Dict[str, Any]:
        data = super().forward(data, training)
        table, inputs = self.train_table if training else self.val_table, data['inputs']
        if table is None or inputs.dtype is not torch.uint8:
            return data
        first = torch.arange(0, len(table), 256, dtype=torch.int32, device=inputs.device)
        return {**data, 'inputs': table[inputs.int() + first[:, None, None]]}


@MODELS.register_module()
class MixupPreprocessor(ImagePreprocessor):
    """Mixes the images and labels of training batches on the device; the labels become weights of classes.

    `TimmClassifier` sets `mix.num_classes`, and its `label_smoothing` acts on the mixed labels.
    Labels of several classes for each image, (B, num_classes), need its `bce`, with which labels
    are smoothed before they are mixed. timm's Mixup, which does the mixing, draws from numpy's
    generator, which SeedHook seeds at each epoch.

    Args:
        mixup_alpha: Parameter of mixup's beta distribution; 0 turns mixup off.
        cutmix_alpha: Parameter of CutMix's beta distribution; 0 turns CutMix off.
        cutmix_minmax: Smallest and largest side of CutMix's box, relative to the image's, instead of `cutmix_alpha`.
        prob: Probability of mixing a batch, or an image if `mode` is 'elem' or 'pair'.
        switch_prob: Probability of CutMix instead of mixup if both are on.
        mode: Whether the 'batch', each 'pair' of images or each image ('elem') has its own mixing parameters.
        non_blocking: Copy batches to the device asynchronously.
    """

    def __init__(self, mixup_alpha: float = 0.8, cutmix_alpha: float = 1.0,
                 cutmix_minmax: Optional[Sequence[float]] = None, prob: float = 1.0, switch_prob: float = 0.5,
                 mode: str = 'batch', non_blocking: bool = True):
        super().__init__(non_blocking)
        if mode not in ('batch', 'pair', 'elem'):
            raise UserError(f'mode must be one of batch, pair, elem, got {mode!r}')
        if not (mixup_alpha or cutmix_alpha or cutmix_minmax):
            raise UserError('mixup_alpha and cutmix_alpha are 0: one of them must be positive')
        self.dimensions = (1,)
        self.mix = Mixup(mixup_alpha, cutmix_alpha, cutmix_minmax, prob, switch_prob, mode, label_smoothing=0.)

    def smooth_binary(self, smoothing: float) -> None:
        """Smooth labels before they are mixed, and accept labels of several classes, for the binary cross-entropy."""
        self.mix.label_smoothing, self.dimensions = smoothing, (1, 2)

    def forward(self, data: Dict[str, Any], training: bool = False) -> Dict[str, Any]:
        """Move a batch to the device and, in training, mix it.

        Args:
            data: dict(inputs=images (B, C, H, W), label=classes (B,)); B must be even in training.
            training: Whether the batch is for training.

        Returns:
            The batch; in training, `label` holds the weights of classes (B, num_classes), which sum up to 1.
        """
        data = super().forward(data, training)
        if not training:
            return data
        inputs, label = data['inputs'], data['label']
        if inputs.ndim != 4 or label.ndim not in self.dimensions:
            raise UserError('MixupPreprocessor mixes images (B, C, H, W) with classes (B,), got '
                            f'inputs {tuple(inputs.shape)} and label {tuple(label.shape)}')
        self.mix.multi_label = label.ndim == 2
        inputs, label = self.mix(inputs, label)
        return {**data, 'inputs': inputs, 'label': label}

    @staticmethod
    def check_batches(loader: Dict[str, Any]) -> None:
        """Refuse a loader that can give batches of an odd size, which cannot be mixed in pairs."""
        batches = loader.get('batch_sampler') or {}
        if batches.get('type') == 'VariableBatchSampler':
            if batches.get('multiple', 2) % 2:
                raise UserError('MixupPreprocessor mixes pairs of images: batch_sampler needs an even multiple, got '
                                f"{batches['multiple']}")
        elif loader['batch_size'] % 2 or not loader.get('drop_last'):
            raise UserError('MixupPreprocessor mixes pairs of images: train_dataloader needs an even batch_size and '
                            f"drop_last=True, got batch_size={loader['batch_size']} and "
                            f"drop_last={loader.get('drop_last', False)}")


def send_bytes(model: nn.Module, loaders: Dict[str, Any]) -> None:
    """Let data sets whose transform ends with the normalization give bytes, a quarter of what has to be copied.

    The values of the images stay the same. RandomErasing needs normalized images, so its data sets stay as they are,
    and so do all if the preprocessor of the TimmClassifier is not an ImagePreprocessor. `loaders` has train_dataloader
    and val_dataloader, whose data sets are changed.
    """
    for part in ('train', 'val'):
        transform = getattr(loaders.get(f'{part}_dataloader', {}).get('dataset'), 'transform', None)
        last = next(reversed(getattr(transform, 'transforms', ())), None)
        if hasattr(last, 'as_bytes') and isinstance(model.data_preprocessor, ImagePreprocessor):
            last.as_bytes = True
            setattr(model.data_preprocessor, f'{part}_table', torch.from_numpy(last.table).flatten())
