"""A timm model as an MMEngine model, and an optimizer constructor for timm's factory."""
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from timm.layers import LayerScale
from timm.loss import BinaryCrossEntropy
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.cli import UserError
from ..zoo import create
from .distillation import Distillation
from .pixels import MixupPreprocessor


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
            self.net.set_grad_checkpointing(True)
        mixed = isinstance(self.data_preprocessor, MixupPreprocessor)
        if mixed:
            self.data_preprocessor.mix.num_classes = self.net.num_classes
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
            self.net.requires_grad_(False)
            for part in self._classifiers():
                part.requires_grad_(True)
            if not any(parameter.requires_grad for parameter in self.net.parameters()):
                raise UserError(f"trainable='head': {name} has no classifier with parameters")
            self.train()
        if channels_last:
            self.net.to(memory_format=torch.channels_last)

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
            inputs = inputs.contiguous(memory_format=torch.channels_last)
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
            raise UserError(f'optimizer: {error}') from error
        if decay_scales:
            _decay_layer_scale(optimizer, net, options.get('weight_decay', 0.))
        for group in optimizer.param_groups:
            # timm's schedulers apply this factor; those of MMEngine start from the group's lr.
            group['lr'] *= group.pop('lr_scale', 1.0)
        return OPTIM_WRAPPERS.build(dict(dict(type='OptimWrapper'), **self.cfg, optimizer=optimizer))
