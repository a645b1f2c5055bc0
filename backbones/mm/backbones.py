"""The families as backbones of detectors and segmenters: `dict(type='PPMA', arch='tiny')` in an OpenMMLab config."""
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import mobilevitv2, myo, ppma
from ..weights import WeightsError, differences, load_state_dict, read_checkpoint, some

# Of the output norms: as in the published detectors, unlike the 1e-6 inside the networks.
NORM_EPS = 1e-5
Arch = Union[str, Dict[str, Any]]


class DenseBackbone:
    """What a detector or segmenter wants of a backbone; mixed into a family's class, whose key names stay.

    Args:
        arch: one of the family's networks by name, or a dict of its options.
        out_indices: which stages' outputs are returned, rising. Stages after the last are not built.
        output_norms: a LayerNorm on each returned level.
        frozen_stages: -1 for none, 0 for the stem, n for the stem and the first n stages, which get no gradients
            and stay in evaluation mode. Output norms are trained on.
        norm_eval: BatchNorm's statistics stay as they are in training.
        with_cp: activation checkpointing.
        drop_path_rate: None for the network's own.
        init_cfg: mmengine's; `dict(type='Pretrained', checkpoint=FILE, prefix=None)` takes every file that
            `subquad.backbones.weights.read_checkpoint` does: a classifier's, or a detector's (its backbone).
        options: of the family.

    Raises:
        ValueError: an argument that is not allowed.
        TypeError: an unknown option.

    However weights come in (`init_cfg`, a Runner's `load_from` or `resume`, `load_state_dict`), a backbone key that is
    missing or has another shape raises `WeightsError`, and nothing is loaded. Only the output norms may be missing, all
    of them at once: from a classifier's file.
    """

    family: type
    archs: Dict[str, Dict[str, Any]] = {}

    def __init__(self, arch: Arch, out_indices: Sequence[int], output_norms: bool, frozen_stages: int = -1,
                 norm_eval: bool = False, with_cp: bool = False, drop_path_rate: Optional[float] = None,
                 init_cfg: Union[None, Dict[str, Any], List[Dict[str, Any]]] = None, **options: Any):
        if isinstance(arch, str) and arch not in self.archs:
            raise ValueError(f"arch must be one of {', '.join(map(repr, self.archs))} or a dict, got {arch!r}")
        options = {**(self.archs[arch] if isinstance(arch, str) else arch), **options}
        if drop_path_rate is not None:
            options['drop_path_rate'] = drop_path_rate
        if issubclass(self.family, ppma.HierarchicalBackbone):
            options['head_hidden_size'] = None
        super().__init__(num_classes=0, **options)
        count = len(self.feature_info)
        indices = [out_indices] if isinstance(out_indices, int) else list(out_indices)
        if not indices or indices != sorted(set(indices)) or not all(i in range(count) for i in indices):
            raise ValueError(f'out_indices must be rising numbers of stages, from 0 to {count - 1}, got '
                             f'{out_indices!r}')
        if frozen_stages not in range(-1, count + 1):
            raise ValueError(f'frozen_stages must be from -1 to {count}, got {frozen_stages!r}')
        if output_norms:
            self.output_norms = nn.ModuleList(
                nn.LayerNorm(info['num_chs'], eps=NORM_EPS) if i in indices else nn.Identity()
                for i, info in enumerate(self.feature_info))
        self.prune_intermediate_layers(indices)
        del self.num_classes                         # mmdet's NumClassCheckHook takes it for the data set's
        self.out_indices, self.frozen_stages, self.norm_eval = tuple(indices), frozen_stages, norm_eval
        self.out_channels = [self.feature_info[i]['num_chs'] for i in indices]
        self.out_strides = [self.feature_info[i]['reduction'] for i in indices]
        self.init_cfg = init_cfg
        self.set_grad_checkpointing(with_cp)
        self.register_load_state_dict_pre_hook(_refuse_gaps)
        for module in self._frozen():
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tuple[Tensor, ...]:
        """(B, in_chans, H, W) -> one map (B, C, H / stride, W / stride), rounded up, for each of `out_indices`."""
        maps = self.forward_intermediates(x, list(self.out_indices), norm=True, stop_early=True,
                                          intermediates_only=True)
        # The families work channels-last, convolutions after them would go on so, and mmcv's RoIAlign then reads the
        # memory in the wrong order: no error, wrong regions.
        return tuple(y.contiguous() for y in maps)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if mode:
            for module in self._frozen():
                module.eval()
            if self.norm_eval:
                for module in self.modules():
                    if isinstance(module, _BatchNorm):
                        module.eval()
        return self

    def init_weights(self) -> None:
        """What `init_cfg` says. Without it the weights are those that the family starts with."""
        if self.is_init:
            return
        given = self.init_cfg
        cfgs = [given] if isinstance(given, dict) else list(given or ())
        pretrained = [cfg for cfg in cfgs if _is_pretrained(cfg)]
        self.init_cfg = [cfg for cfg in cfgs if cfg not in pretrained]
        try:
            super().init_weights()
        finally:
            self.init_cfg = given
        for cfg in pretrained:
            self.load_pretrained(**{key: value for key, value in cfg.items() if key not in ('type', 'map_location')})

    def load_pretrained(self, checkpoint: str, prefix: Optional[str] = None) -> None:
        """Load a classifier's or a detector's file, every weight of the backbone, or none.

        Args:
            checkpoint: path of the file; see `subquad.backbones.weights.read_checkpoint`.
            prefix: of the keys that are meant, such as 'backbone.'; by default that of a detector is taken off.

        Raises:
            WeightsError: the file cannot be read, or is not this backbone's: which keys, which shapes.
        """
        if '://' in str(checkpoint):
            raise WeightsError(f'checkpoint must be the path of a file, got {checkpoint}; download it first')
        weights, _, _ = read_checkpoint(checkpoint)
        if prefix:
            prefix = prefix.rstrip('.') + '.'
            chosen = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
            if not chosen:
                first = sorted({key.split('.')[0] + '.' for key in weights})
                raise WeightsError(f'{checkpoint} has no keys that begin with {prefix!r}; they begin with '
                                   f'{some(first, 6)}')
            weights = chosen
        load_state_dict(self, weights, str(checkpoint))

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """The family's translation, without the stages and output norms that were not asked for."""
        weights = super().translate_checkpoint(weights)
        own = self.state_dict()
        return {key: value for key, value in weights.items() if key in own or not (
            key.startswith('output_norms.') or key.startswith('stages.') and _stage(key) >= len(self.stages))}

    def _frozen(self) -> List[nn.Module]:
        return [self.stem, *list(self.stages)[:self.frozen_stages]] if self.frozen_stages >= 0 else []


def _stage(key: str) -> int:
    number = key.split('.')[1]
    return int(number) if number.isdecimal() else -1


def _is_pretrained(cfg: Dict[str, Any]) -> bool:
    return getattr(cfg['type'], '__name__', cfg['type']) in ('Pretrained', 'PretrainedInit')


def _refuse_gaps(backbone: nn.Module, weights: Dict[str, Tensor], prefix: str, *_: Any) -> None:
    """mmengine logs keys that do not fit and goes on, with random weights; here that ends in an error."""
    own = {f'{prefix}{key}': value for key, value in backbone.state_dict().items()
           if not key.endswith('num_batches_tracked')}
    norms = {key for key in own if key.startswith(f'{prefix}output_norms.')}
    if not norms & weights.keys():
        own = {key: value for key, value in own.items() if key not in norms}
    problems = differences(own, {key: value for key, value in weights.items() if key in own})
    if problems:
        raise WeightsError(f"not a checkpoint of this {type(backbone).__name__} backbone: {'; '.join(problems)}")


@MODELS.register_module()
class PPMA(DenseBackbone, ppma.PPMA, BaseModule):
    """PPMA's stages at strides 4, 8, 16 and 32; see `DenseBackbone` and `subquad.backbones.PPMA`."""

    family, archs = ppma.PPMA, ppma.ARCHS

    def __init__(self, arch: Arch = 'tiny', out_indices: Sequence[int] = (0, 1, 2, 3), output_norms: bool = True,
                 **kwargs: Any):
        super().__init__(arch, out_indices, output_norms, **kwargs)


@MODELS.register_module()
class Myo(DenseBackbone, myo.Myo, BaseModule):
    """Myo's stages at strides 4, 8, 16 and 32; see `DenseBackbone` and `subquad.backbones.Myo`."""

    family, archs = myo.Myo, myo.ARCHS

    def __init__(self, arch: Arch = 'tiny', out_indices: Sequence[int] = (0, 1, 2, 3), output_norms: bool = True,
                 **kwargs: Any):
        super().__init__(arch, out_indices, output_norms, **kwargs)


@MODELS.register_module()
class MobileViTv2(DenseBackbone, mobilevitv2.MobileViTv2, BaseModule):
    """MobileViTv2's five stages at strides 2, 4, 8, 16 and 32, the last ones' less with `output_stride=16` or 8; they
    end in BatchNorm and take no other norm by default. See `DenseBackbone` and `subquad.backbones.MobileViTv2`."""

    family, archs = mobilevitv2.MobileViTv2, mobilevitv2.ARCHS

    def __init__(self, arch: Arch = '100', out_indices: Sequence[int] = (1, 2, 3, 4), output_norms: bool = False,
                 **kwargs: Any):
        super().__init__(arch, out_indices, output_norms, **kwargs)
