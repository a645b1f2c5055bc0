"""timm's model interface, written once for all families of image backbones."""
from typing import Any, ClassVar, Dict, List, Optional, Set, Tuple, Union

from timm.layers import get_device_dtype, trunc_normal_
from torch import Tensor, nn

from ._timm import feature_take_indices, narrow_head, pooled_width
from .mixers import LinformerSelfAttention
from .options import COMMON, Options, check


class TimmInterface(nn.Module):
    """Base of the families, which make `stem`, `stages`, `head` (a module with `fc` and `reset`), `feature_info`,
    `num_features`, `head_hidden_size` and, where they have them, `output_norms`.

    Args:
        num_classes: 0 for no classifier.
        in_chans: input channels.

    Attributes:
        OPTIONS: every option of the family; see `subquad.backbones.options`.
    """

    OPTIONS: ClassVar[Options] = COMMON

    def __init__(self, num_classes: int, in_chans: int):
        super().__init__()
        self.num_classes, self.in_chans = num_classes, in_chans
        self.output_norms: Optional[nn.ModuleList] = None

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Weights under this model's key names, from those of published files; families with such files override it."""
        return weights

    def set_input_size(self, img_size: Union[None, int, Tuple[int, int]] = None) -> None:
        """Check a size, as timm's models of a fixed size change theirs: no weight here depends on it.

        Raises:
            ValueError: a side below 32, or a network with Linformer attention, which is made for one size.
        """
        check(type(self).__name__, self.OPTIONS, {'img_size': img_size})
        if img_size is not None and any(isinstance(module, LinformerSelfAttention) for module in self.modules()):
            raise ValueError(f'Linformer attention is made for one image size: pass img_size={img_size!r} to '
                             'timm.create_model')

    def no_weight_decay(self) -> Set[str]:
        """Names of parameters that take no weight decay whatever their rank; families add theirs."""
        return set()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """A new classifier (none for 0), its weights random; `global_pool` None keeps the pooling.

        Raises:
            ValueError: a number of classes or a pooling that is not allowed.
        """
        pooling = {} if global_pool is None else {'global_pool': global_pool}
        check(type(self).__name__, self.OPTIONS, {'num_classes': num_classes, **pooling})
        self.head.reset(num_classes, global_pool, **get_device_dtype(self))
        self.num_classes = num_classes
        self.head_hidden_size = pooled_width(self.head)
        self.head.fc.apply(init_linear)

    def forward_intermediates(self, x: Tensor, indices: Union[None, int, List[int]] = None, norm: bool = False,
                              stop_early: bool = False, output_fmt: str = 'NCHW', intermediates_only: bool = False,
                              ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]]]:
        """Outputs of the stages, and of `forward_features`.

        Args:
            x: (B, in_chans, H, W).
            indices: which stages: the last n if int, all if None.
            norm: apply the output norms, where the model has them (`output_norms=True`).
            stop_early: do not run stages after the last one wanted.
            output_fmt: 'NCHW' or 'NHWC'.
            intermediates_only: return the list alone.

        Returns:
            (features, [stage outputs]) or the list.
        """
        if output_fmt not in ('NCHW', 'NHWC'):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        x = self.stem(x)
        for i, stage in enumerate(self.stages[:last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in take:
                y = x.permute(0, 2, 3, 1)
                y = self.output_norms[i](y) if norm and self.output_norms is not None else y
                intermediates.append(y if output_fmt == 'NHWC' else y.permute(0, 3, 1, 2))
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(self, indices: Union[int, List[int]] = 1, prune_norm: bool = False,
                                  prune_head: bool = True) -> List[int]:
        """Drop the stages after the last one wanted, and the head; returns the indices of the stages wanted."""
        take, last = feature_take_indices(len(self.stages), indices)
        shorter = last < len(self.stages) - 1
        self.stages = self.stages[:last + 1]
        if prune_norm:
            self.output_norms = None
        elif self.output_norms is not None:
            self.output_norms = self.output_norms[:last + 1]
        if shorter or prune_head:
            self.num_features = self.feature_info[last]['num_chs']
            narrow_head(self.head, self.num_features)
            self.reset_classifier(0)
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> the last stage's output, (B, num_features, ceil(H/32), ceil(W/32))
        unless the family says otherwise."""
        return self.stages(self.stem(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features of `forward_features` -> logits (B, num_classes), or what the classifier takes with pre_logits."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def init_linear(module: nn.Module) -> None:
    """Linear layers from a normal distribution of standard deviation 0.02, cut at 2; no bias."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def init_kaiming(module: nn.Module) -> None:
    """Convolutions by He et al. with the fan of the output, linear layers as `init_linear`."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode='fan_out')
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    init_linear(module)


def init_xavier(module: nn.Module) -> None:
    """Linear layers by Glorot & Bengio; no bias."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
