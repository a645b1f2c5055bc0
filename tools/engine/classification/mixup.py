"""Mixup and CutMix of whole batches, by timm."""
from collections.abc import Sequence
from typing import Any, Dict, Optional

from mmengine.registry import MODELS
from timm.data import Mixup

from ...common.cli import UserError
from .pixels import ImagePreprocessor

_MODES = ('batch', 'pair', 'elem')


@MODELS.register_module()
class MixupPreprocessor(ImagePreprocessor):
    """Mixes the images and labels of training batches on the device; the labels become weights of classes.

    `TimmClassifier` sets `num_classes`, and its `label_smoothing` acts on the mixed labels. Labels of several classes
    for each image, (B, num_classes), need its `bce`, with which labels are smoothed before they are mixed. timm's
    Mixup, which does the mixing, draws from numpy's generator, which SeedHook seeds at each epoch.

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
        if mode not in _MODES:
            raise UserError(f'mode must be one of {", ".join(_MODES)}, got {mode!r}')
        if min(mixup_alpha, cutmix_alpha) < 0 or not (mixup_alpha or cutmix_alpha or cutmix_minmax):
            raise UserError('mixup_alpha and cutmix_alpha must not be negative, and one of them must be positive, got '
                            f'{mixup_alpha} and {cutmix_alpha}')
        self.dimensions = (1,)
        self.mix = Mixup(mixup_alpha, cutmix_alpha, cutmix_minmax, prob, switch_prob, mode, label_smoothing=0.)

    @property
    def num_classes(self) -> int:
        return self.mix.num_classes

    @num_classes.setter
    def num_classes(self, number: int) -> None:
        self.mix.num_classes = number

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
