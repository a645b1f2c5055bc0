"""Knowledge distillation from a teacher, which is any timm classifier with trained weights."""
from typing import Any, Dict, List, Optional, Sequence

import timm
import timm.data
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from ....backbones.weights.metadata import class_difference
from ....backbones.weights.resolve import published
from ...common.cli import UserError, one_line
from ..zoo import create
from .weight_files import read_classifier


def divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compute KL(softmax(teacher / T) || softmax(logits / T)) of logits (B, num_classes), the mean over images."""
    student, target = (F.log_softmax(x.float() / temperature, -1) for x in (logits, teacher))
    return F.kl_div(student, target, reduction='batchmean', log_target=True)


@MODELS.register_module()
class Distillation:
    """Adds the loss to a teacher's predictions to the loss of TimmClassifier (Touvron et al. 2021, equations 2 and 3).

    'soft': (1 - alpha) * loss + alpha * T^2 * KL(softmax(teacher / T) || softmax(logits / T)).
    'hard': (1 - alpha) * loss + alpha * CE(logits, argmax(teacher)).

    The teacher gets the same batch, mixed if the student's is. It is frozen, in eval mode, and no part of the model:
    checkpoints, averages of the weights and the optimizer do not hold it. If its preprocessing has another mean or
    standard deviation, the batch is normalized again for it.

    Args:
        teacher: dict(weights=..., name=...): a file of weights or the name of published ones, and the timm name
            if the file does not hold it; or dict(name=..., pretrained=True) for timm's own weights. Optional `mean`
            and `std`, three numbers each, are those of the teacher's preprocessing (default: what its weights define).
        kind: 'soft' or 'hard'.
        alpha: Share of the distillation in the loss, above 0 and at most 1.
        temperature: T of 'soft'.
    """

    def __init__(self, teacher: Dict[str, Any], kind: str = 'soft', alpha: float = 0.5,
                 temperature: float = 1.):
        if kind not in ('soft', 'hard'):
            raise UserError(f"kind must be 'soft' or 'hard', got {kind!r}")
        if not 0 < alpha <= 1:
            raise UserError(f'alpha must be above 0 and at most 1, got {alpha}')
        if temperature <= 0:
            raise UserError(f'temperature must be positive, got {temperature}')
        self.kind, self.alpha, self.temperature = kind, alpha, temperature
        if bool(teacher.get('weights')) == bool(teacher.get('pretrained')):
            raise UserError('teacher needs trained weights: either weights=FILE_OR_NAME or name=NAME with '
                            'pretrained=True')
        self._build(**teacher)
        self.net.eval().requires_grad_(False)
        # (scale, shift) of the batch per channel, or None: the student's preprocessing is that of the teacher.
        self.renormalization: Optional[List[Tensor]] = None

    def _build(self, name: Optional[str] = None, weights: Optional[str] = None, pretrained: bool = False,
               mean: Optional[Sequence[float]] = None, std: Optional[Sequence[float]] = None) -> None:
        """Set the network, its classes if they are known, and its mean and standard deviation."""
        self.net: nn.Module
        self.classes: List[str] = []
        if weights:
            read = read_classifier(weights, name)
            self.net, self.name, transform = read.model, read.name, read.transform
            if not published(weights):                           # folders of ImageNet have other names than classes
                self.classes = read.classes
        else:
            if not name:
                raise UserError('teacher: pretrained=True needs the name of a timm model')
            if not timm.is_model(name):
                create(name)                                     # raises, with the nearest names
            try:
                self.net, self.name, transform = timm.create_model(name, pretrained=True), name, {}
            except Exception as error:                           # of timm, huggingface_hub, requests or httpx
                raise UserError(f'teacher {name}: its pretrained weights cannot be loaded: '
                                f'{one_line(error)}') from error
        transform = {**timm.data.resolve_model_data_config(self.net), **transform}
        self.mean, self.std = tuple(mean or transform['mean']), tuple(std or transform['std'])

    def __deepcopy__(self, memo: Dict[int, Any]) -> 'Distillation':
        """Return the same object: the average of a student's weights needs no teacher of its own."""
        return self

    def prepare(self, num_classes: int, classes: Sequence[str], transform: Optional[Dict[str, Any]]) -> None:
        """Check that the teacher fits the data, and see whether its batches must be normalized again.

        The student has `num_classes` classes, the data have the names `classes`, and `transform` has the arguments of
        timm.data.create_transform for the training images.
        """
        if transform is None:
            raise UserError('distillation is for images: train_dataloader.dataset has no transform')
        other = class_difference(self.classes, classes)
        if other:
            raise UserError(f'distillation: the teacher {self.name} {other}')
        mean = tuple(transform.get('mean', IMAGENET_DEFAULT_MEAN))
        std = tuple(transform.get('std', IMAGENET_DEFAULT_STD))
        if (mean, std) != (self.mean, self.std):
            own, other = ([torch.tensor(x).view(-1, 1, 1) for x in pair]
                          for pair in ((mean, std), (self.mean, self.std)))
            self.renormalization = [own[1] / other[1], (own[0] - other[0]) / other[1]]
        size = transform.get('input_size', 224)
        size = (3, size, size) if isinstance(size, int) else (3, *size[-2:])
        self._check(self(torch.zeros(1, *size)), num_classes)

    def _check(self, logits: Tensor, num_classes: int) -> None:
        """Refuse logits of another shape than (B, num_classes)."""
        if logits.ndim != 2 or logits.shape[1] != num_classes:
            raise UserError(f'distillation: the teacher {self.name} returns logits {tuple(logits.shape)}, but (B, '
                            f'{num_classes}) are needed for the {num_classes} classes of the model')

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the teacher's logits (B, num_classes) of a batch (B, 3, H, W) for the student."""
        device = inputs.device
        if next(self.net.parameters()).device != device:
            self.net.to(device)
        if self.renormalization is not None:
            scale, shift = (x.to(device) for x in self.renormalization)
            inputs = inputs * scale + shift
        try:
            return self.net(inputs)
        except (AssertionError, RuntimeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UserError(f'distillation: the teacher {self.name} does not accept a batch {tuple(inputs.shape)}: '
                            f'{one_line(error)}') from error

    def losses(self, loss: Tensor, logits: Tensor, inputs: Tensor) -> Dict[str, Tensor]:
        """Return the two terms of the loss, whose sum is minimized.

        `loss` is that of the labels, `logits` (B, num_classes) are the student's for the batch (B, 3, H, W).
        """
        teacher = self(inputs)
        self._check(teacher, logits.shape[-1])
        if self.kind == 'hard':
            distilled = F.cross_entropy(logits.float(), teacher.argmax(-1))
        else:
            distilled = divergence(logits, teacher, self.temperature) * self.temperature ** 2
        return dict(loss_label=(1 - self.alpha) * loss, loss_distillation=self.alpha * distilled)
