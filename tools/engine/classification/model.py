"""A timm model as an MMEngine model, its metrics, and an optimizer constructor for timm's factory."""
import math
import re
from inspect import signature
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import METRICS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from timm.layers import LayerScale
from timm.loss import BinaryCrossEntropy
from timm.optim import create_optimizer_v2, get_optimizer_class
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.cli import UserError, nearest
from ..zoo import create
from .distillation import Distillation
from .mixup import MixupPreprocessor


@MODELS.register_module()
class TimmClassifier(BaseModel):
    """Any timm classifier by name, of images or of tokens; its weights are `net.*` in the state dict.

    A classifier of tokens returns logits (B, T, num_classes). Tokens with a negative label count neither in the
    loss nor in the metrics.

    Args:
        name: timm model name.
        label_smoothing: Label smoothing of the loss.
        bce: dict(target_threshold=None, sum_classes=False), the arguments of timm's BinaryCrossEntropy, which takes the
            place of the cross-entropy; dict() for its defaults. Labels of several classes for each image need it.
        grad_checkpointing: Recompute activations in the backward pass instead of keeping them.
        data_preprocessor: MMEngine's config of a preprocessor for whole batches, such as MixupPreprocessor.
        distillation: MMEngine's config of a Distillation, which adds a teacher to the loss.
        trainable: 'all', or 'head' for a linear probe: only the classifier is trained. The rest is frozen and stays in
            eval mode, so that BatchNorm uses and keeps its running statistics and drop path is off.
        channels_last: Keep weights and images in the memory format torch.channels_last.
        kwargs: Arguments of timm.create_model (num_classes, drop_path_rate, ...).
    """

    def __init__(self, name: str, label_smoothing: float = 0., grad_checkpointing: bool = False,
                 data_preprocessor: Optional[Dict[str, Any]] = None, distillation: Optional[Dict[str, Any]] = None,
                 trainable: str = 'all', channels_last: bool = False, bce: Optional[Dict[str, Any]] = None,
                 **kwargs: Any):
        super().__init__(data_preprocessor=data_preprocessor or dict(type='ImagePreprocessor'))
        self.net = create(name, **kwargs)
        if grad_checkpointing:
            self._checkpoint_gradients(name)
        mixed = isinstance(self.data_preprocessor, MixupPreprocessor)
        if mixed:
            self.data_preprocessor.num_classes = self.net.num_classes
        # As in timm, labels are smoothed before they are mixed.
        self.bce = None if bce is None else BinaryCrossEntropy(label_smoothing, smooth_dense=not mixed, **bce)
        if mixed and self.bce:
            self.data_preprocessor.smooth_binary(label_smoothing)
        self.label_smoothing, self.has_weights = label_smoothing, False
        self.distillation: Optional[Distillation] = MODELS.build(distillation) if distillation else None
        self.mesa: Optional[Hook] = None                         # MESAHook sets itself
        if trainable not in ('all', 'head'):
            raise UserError(f"trainable must be 'all' or 'head', got {trainable!r}")
        self.trainable, self.channels_last = trainable, channels_last
        if trainable == 'head':
            self._freeze(name)
        if channels_last:
            self.net.to(memory_format=torch.channels_last)

    def _freeze(self, name: str) -> None:
        """Freeze all but the classifier."""
        self.net.requires_grad_(False)
        for part in self._classifiers():
            part.requires_grad_(True)
        if not any(parameter.requires_grad for parameter in self.net.parameters()):
            raise UserError(f"trainable='head': {name} has no classifier with parameters")
        self.train()

    def _classifiers(self) -> Tuple[nn.Module, ...]:
        classifiers = self.net.get_classifier()
        return tuple(classifiers) if isinstance(classifiers, (tuple, list)) else (classifiers,)

    def train(self, mode: bool = True) -> 'TimmClassifier':
        """Set the mode; what is frozen stays in eval mode."""
        super().train(mode)
        if mode and self.trainable == 'head':
            self.net.eval()
            for part in self._classifiers():
                part.train()
        return self

    def _checkpoint_gradients(self, name: str) -> None:
        try:
            self.net.set_grad_checkpointing(True)
        except (AssertionError, AttributeError) as error:        # timm's way to refuse
            raise UserError(f'{name} does not support grad_checkpointing') from error

    def init_weights(self) -> None:
        """Initialize the weights unless they were loaded (`has_weights`).

        MMEngine calls this before training. Some networks of timm have an `init_weights`, which would overwrite them.
        """
        if not self.has_weights:
            super().init_weights()

    def forward(self, inputs: Tensor, label: Optional[Tensor] = None,
                mode: str = 'tensor') -> Union[Tensor, Dict[str, Tensor], List[Dict[str, Tensor]]]:
        """Compute logits, loss or predictions.

        Args:
            inputs: Images (B, 3, H, W), or tokens (B, T).
            label: Classes (B,), weights of classes (B, num_classes) after mixup, or which classes an image has, float
                (B, num_classes); classes (B, T) of tokens.
            mode: 'tensor', 'loss' or 'predict'.

        Returns:
            Logits (B, num_classes) or (B, T, num_classes), a dict of losses to add up, or a list with
            dict(scores, label) for each image or sequence: scores (num_classes,) of an image, or (n, num_classes) of
            the n tokens with a label. Scores are probabilities: of each class by itself if an image has several.
        """
        if self.channels_last:
            inputs = _channels_last(inputs)
        logits = self.net(inputs)
        if logits.ndim == 3 and mode != 'tensor':
            return self._of_tokens(logits, label, mode)
        if mode == 'loss':
            return self._losses(logits, inputs, label)
        if mode == 'predict':
            several = label.ndim == 2 and label.is_floating_point()
            scores = logits.float().sigmoid() if several else logits.float().softmax(-1)
            return [dict(scores=s, label=n) for s, n in zip(scores, label)]
        return logits

    def _losses(self, logits: Tensor, inputs: Tensor, label: Tensor) -> Dict[str, Tensor]:
        """Return the terms of the loss of images or whole sequences."""
        if self.bce:
            loss = self.bce(logits.float(), label.float() if label.ndim == 2 else label)
        elif label.ndim == 2 and not isinstance(self.data_preprocessor, MixupPreprocessor):
            raise UserError('images have several classes each, which needs model.bce=dict() in the config')
        else:
            loss = F.cross_entropy(logits.float(), label, label_smoothing=self.label_smoothing)
        if not (self.distillation or self.mesa):
            return dict(loss=loss)
        # MMEngine adds all terms up to 'loss', which therefore must not be the name of one.
        losses = self.distillation.losses(loss, logits, inputs) if self.distillation else dict(loss_label=loss)
        if self.mesa:
            losses['loss_mesa'] = self.mesa.loss(logits, inputs)
        return losses

    def _of_tokens(self, logits: Tensor, label: Tensor, mode: str) -> Union[Dict[str, Tensor], List[Dict[str, Tensor]]]:
        """Return the loss or the predictions of the tokens that have a label."""
        known = label >= 0
        if mode == 'loss':
            if self.mesa or self.bce:
                raise UserError(f"{'MESAHook' if self.mesa else 'bce'} needs logits (B, num_classes), got those of "
                                'tokens (B, T, num_classes)')
            return dict(loss=F.cross_entropy(logits[known].float(), label[known],
                                             label_smoothing=self.label_smoothing))
        return [dict(scores=s[k].float().softmax(-1), label=n[k]) for s, n, k in zip(logits, label, known)]


def _channels_last(images: Tensor) -> Tensor:
    if images.ndim != 4:
        raise UserError(f'channels_last is for images (B, C, H, W), got a batch {tuple(images.shape)}')
    return images.contiguous(memory_format=torch.channels_last)


_WRONG = 2 ** 31                                                # a rank larger than every k


@METRICS.register_module()
class AccuracyMetric(BaseMetric):
    """Percentage of images, or of labeled tokens, whose class is among the k best: accuracy/top1, accuracy/top5.

    Images with a negative label, which could not be read, do not count. A class with the same score as the label ranks
    before it, and an image with a score that is NaN or infinite counts as wrong. A network with constant outputs
    therefore has an accuracy of 0.
    """

    default_prefix = 'accuracy'

    def __init__(self, topk: Sequence[int] = (1, 5), **kwargs: Any):
        super().__init__(**kwargs)
        self.topk = topk

    def process(self, data_batch: Any, data_samples: Sequence[Dict[str, Tensor]]) -> None:
        for sample in data_samples:
            scores, label = _rows(sample)
            # The label's own score is counted, too: subtract 1.
            ranks = (scores >= scores.gather(1, label)).sum(1) - 1
            self.results.append(ranks.where(scores.isfinite().all(1), _WRONG).tolist())

    def compute_metrics(self, results: List[List[int]]) -> Dict[str, float]:
        ranks = torch.tensor([rank for sample in results for rank in sample])
        return {f'top{k}': (ranks < k).float().mean().item() * 100 for k in self.topk}


def _rows(sample: Dict[str, Any]) -> Tuple[Tensor, Tensor]:
    """Return the scores (n, num_classes) and labels (n, 1) of an image, n = 1 (0 without label), or of n tokens."""
    scores = sample['scores'].reshape(-1, sample['scores'].shape[-1])
    label = torch.as_tensor(sample['label'], device=scores.device).reshape(-1, 1)
    if len(label) != len(scores):
        raise UserError("labels of several classes for each image need the metric dict(type='MultiLabelMetric')")
    known = label[:, 0] >= 0
    return scores[known], label[known]


@METRICS.register_module()
class MultiLabelMetric(BaseMetric):
    """multi_label/mAP: the mean over the classes that images have of the average precision, in percent.

    The average precision of a class is the sum over images in the order of its score, the highest first, of
    (recall - recall before) * precision; images with equal scores count together, and a score that is not finite is the
    lowest. An image with a negative label, which could not be read, does not count.
    """

    default_prefix = 'multi_label'

    def process(self, data_batch: Any, data_samples: Sequence[Dict[str, Tensor]]) -> None:
        self.results += [(sample['scores'].cpu().nan_to_num(-1., -1., -1.), sample['label'].cpu())
                         for sample in data_samples]

    def compute_metrics(self, results: List[Tuple[Tensor, Tensor]]) -> Dict[str, float]:
        scores, labels = (torch.stack(part) for part in zip(*results))
        known = (labels >= 0).all(1)
        found = [average_precision(s, n) for s, n in zip(scores[known].T, labels[known].T > 0.5) if n.any()]
        return dict(mAP=100 * sum(found) / len(found) if found else math.nan)


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Return the average precision of a class, see `MultiLabelMetric`, of scores (n,) and booleans (n,)."""
    order = scores.argsort(descending=True)
    scores, found = scores[order], positive[order].double().cumsum(0)
    last = torch.cat([scores[1:] != scores[:-1], torch.tensor([True])]).nonzero()[:, 0]        # of equal scores
    gained = found[last].diff(prepend=torch.zeros(1, dtype=torch.double))
    return float((gained * found[last] / (last + 1)).sum() / found[-1])


@METRICS.register_module()
class PerplexityMetric(BaseMetric):
    """language/perplexity, and language/log_likelihood: its negative logarithm, the mean over tokens in nats."""

    default_prefix = 'language'

    def process(self, data_batch: Any, data_samples: Sequence[Dict[str, Tensor]]) -> None:
        for sample in data_samples:
            scores, label = _rows(sample)
            self.results.append((scores.double().gather(1, label).log().sum().item(), len(label)))

    def compute_metrics(self, results: List[Tuple[float, int]]) -> Dict[str, float]:
        total, count = (sum(part) for part in zip(*results))
        mean = total / count
        return dict(perplexity=math.exp(min(-mean, 700)), log_likelihood=mean)


def _nearest_argument(error: Exception, options: Dict[str, Any]) -> str:
    """'; did you mean NAME?' for an argument that neither timm nor the optimizer has, else ''."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if not unknown:
        return ''
    known = {*signature(create_optimizer_v2).parameters,
             *signature(get_optimizer_class(options.get('opt', 'sgd'), bind_defaults=False)).parameters}
    return nearest(unknown[1], sorted(known - {'model_or_params', 'params'}), 1)


def _decay_layer_scale(optimizer: Optimizer, net: nn.Module, weight_decay: float) -> None:
    """Move the factors of LayerScale to groups of parameters with weight decay."""
    scales = {id(module.gamma) for module in net.modules() if isinstance(module, LayerScale)}
    for group in [*optimizer.param_groups]:
        moved = [p for p in group['params'] if id(p) in scales]
        if moved:
            group['params'] = [p for p in group['params'] if id(p) not in scales]
            optimizer.add_param_group({**group, 'params': moved, 'weight_decay': weight_decay})


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class TimmOptimizerConstructor:
    """timm.optim.create_optimizer_v2 from `optimizer=dict(opt='adamw', lr=..., weight_decay=..., layer_decay=...)`.

    With decay_layer_scale=True, the factors of LayerScale have weight decay, unlike other vectors.
    """

    def __init__(self, optim_wrapper_cfg: Dict[str, Any], paramwise_cfg: Optional[Dict[str, Any]] = None):
        self.cfg = dict(optim_wrapper_cfg)
        if paramwise_cfg:
            raise UserError('paramwise_cfg is not supported by TimmOptimizerConstructor: the model defines what is '
                            'exempt from weight decay, and layer_decay is an entry of optimizer')

    def __call__(self, model: TimmClassifier) -> OptimWrapper:
        options = dict(self.cfg.pop('optimizer'))
        decay_scales, net = options.pop('decay_layer_scale', False), getattr(model, 'module', model).net
        try:
            optimizer = create_optimizer_v2(net, **options)
        except (TypeError, ValueError) as error:
            raise UserError(f'optimizer: {error}{_nearest_argument(error, options)}') from error
        if decay_scales:
            _decay_layer_scale(optimizer, net, options.get('weight_decay', 0.))
        for group in optimizer.param_groups:
            # timm's schedulers apply this factor; those of MMEngine start from the group's lr.
            group['lr'] *= group.pop('lr_scale', 1.0)
        return OPTIM_WRAPPERS.build(dict(dict(type='OptimWrapper'), **self.cfg, optimizer=optimizer))
