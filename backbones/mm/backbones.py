"""The families as backbones of detectors and segmenters: `dict(type='PPMA', arch='tiny')` in an OpenMMLab config."""
import os
import re
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from mmengine.logging import print_log
from mmengine.model import BaseModel, BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_module_registration_hook

from .. import mobilevitv2, myo, ppma
from ..weights import WeightsError, check_finite, differences, load_state_dict, read_checkpoint, some
from . import cvnets
from .checkpoints import BACKBONE, Fit, guard

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

    Attributes:
        loaded: which weights `init_cfg` loaded from which file, one sentence; None before.

    Raises:
        ValueError: an argument that is not allowed.
        TypeError: an unknown option.

    However weights come in (`init_cfg`, a Runner's `load_from` or `resume`, `load_state_dict`), a backbone key that is
    missing, unknown or has another shape raises `WeightsError`, and nothing is loaded. Only the output norms may be
    missing, all of them at once: from a classifier's file. Stages and output norms that `out_indices` leaves out, and
    the classifier's head, may be in the file. A detector or segmenter with this backbone is loaded as strictly; see
    `subquad.backbones.mm.checkpoints.guard`.
    """

    family: type
    archs: Dict[str, Dict[str, Any]] = {}
    loaded: Optional[str] = None

    def __init__(self, arch: Arch, out_indices: Sequence[int], output_norms: bool, frozen_stages: int = -1,
                 norm_eval: bool = False, with_cp: bool = False, drop_path_rate: Optional[float] = None,
                 init_cfg: Union[None, Dict[str, Any], List[Dict[str, Any]]] = None, **options: Any):
        if isinstance(arch, str) and arch not in self.archs:
            raise ValueError(f"arch must be one of {', '.join(map(repr, self.archs))} or a dict, got {arch!r}")
        _check_init_cfg(init_cfg)
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
        self.num_stages = count
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
        # The last to act, and before mmengine logs where each parameter comes from.
        self.init_cfg = [*(cfg for cfg in cfgs if cfg not in pretrained),
                         *({**cfg, 'type': _PretrainedInit} for cfg in pretrained)]
        try:
            super().init_weights()
        finally:
            self.init_cfg = given

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
        check_finite(weights, str(checkpoint))
        load_state_dict(self, weights, str(checkpoint))
        self._note(weights, f'{checkpoint}{f" ({prefix})" if prefix else ""}')

    def _note(self, weights: Dict[str, Tensor], name: str) -> None:
        """Log which of the weights were loaded, for the whole and for each parameter."""
        # What a detector's file calls its backbone; beside it are the heads.
        inner = next((name for name in (BACKBONE, cvnets.ENCODER) if any(key.startswith(name) for key in weights)), '')
        given = super().translate_checkpoint({key.removeprefix(inner): value for key, value in weights.items()
                                              if key.startswith(inner)})
        own = self.state_dict()
        unused = [key for key in given if key not in own] + [key for key in weights if not key.startswith(inner)]
        found = Fit({key: value for key, value in given.items() if key in own},
                    [key for key in own if key not in given], unused, [])
        self.loaded = f'{type(self).__name__} backbone: {found.summary(name)}'
        for key, parameter in self.named_parameters():
            facts = getattr(self, '_params_init_info', {}).get(parameter)
            if facts is not None:                        # mmengine writes them to the log
                facts['init_info'] = f'Loaded from {name}' if key in given else f'Initial value, not in {name}'
                facts['tmp_mean_value'] = parameter.data.mean().cpu()        # unlike it: changed again
        print_log(self.loaded, logger='current')

    def refuse_gaps(self, weights: Dict[str, Tensor], prefix: str) -> None:
        """Refuse weights, under names with that prefix, that are not all of this backbone's.

        Raises:
            WeightsError: which keys, which shapes.
        """
        _refuse_gaps(self, weights, prefix)

    def left_out(self, weights: Dict[str, Any]) -> List[str]:
        """Names of the weights that `translate_checkpoint` drops, because `out_indices` does not ask for them."""
        return [key for key in super().translate_checkpoint(weights) if self._not_built(key)]

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """The family's translation, without the stages and output norms that were not asked for."""
        weights = super().translate_checkpoint(weights)
        return {key: value for key, value in weights.items() if not self._not_built(key)}

    def _not_built(self, key: str) -> bool:
        """Whether the key is of a stage or output norm that the family has and `out_indices` leaves out."""
        part, _, rest = key.partition('.')
        number = rest.partition('.')[0]
        if part not in ('stages', 'output_norms') or not number.isdecimal() or int(number) >= self.num_stages:
            return False
        if part == 'stages':
            return int(number) >= len(self.stages)
        return self.output_norms is None or int(number) not in self.out_indices

    def _frozen(self) -> List[nn.Module]:
        return [self.stem, *list(self.stages)[:self.frozen_stages]] if self.frozen_stages >= 0 else []


class _PretrainedInit:
    """mmengine's initializer of that name for `DenseBackbone`, which reads more files and loads all or nothing."""

    def __init__(self, checkpoint: Any, prefix: Optional[str] = None, map_location: Any = None):
        self.options = dict(checkpoint=checkpoint, prefix=prefix)

    def __call__(self, backbone: DenseBackbone) -> None:
        backbone.load_pretrained(**self.options)


def _check_init_cfg(init_cfg: Any) -> None:
    """Refuse an init_cfg that mmengine would stumble over later.

    Raises:
        TypeError: it is neither None nor dict(type=...) nor a list of these; or a path is none.
    """
    for cfg in init_cfg if isinstance(init_cfg, (list, tuple)) else [] if init_cfg is None else [init_cfg]:
        if not isinstance(cfg, dict) or not cfg.get('type'):
            raise TypeError("init_cfg must be None, a dict such as dict(type='Pretrained', checkpoint=FILE) or a list "
                            f'of them, got {init_cfg!r}')
        if not _is_pretrained(cfg):
            continue
        unknown = set(cfg) - {'type', 'checkpoint', 'prefix', 'map_location'}
        if unknown:
            raise TypeError(f'init_cfg of type Pretrained takes checkpoint and prefix, got {sorted(unknown)[0]!r}')
        if not isinstance(cfg.get('checkpoint'), (str, os.PathLike)) or not str(cfg['checkpoint']):
            raise TypeError(f"init_cfg: checkpoint must be the path of a file, got {cfg.get('checkpoint')!r}")
        if not isinstance(cfg.get('prefix'), (str, type(None))):
            raise TypeError(f"init_cfg: prefix must be a string or None, got {cfg['prefix']!r}")


def _is_pretrained(cfg: Dict[str, Any]) -> bool:
    return getattr(cfg['type'], '__name__', cfg['type']) in ('Pretrained', 'PretrainedInit')


def _refuse_gaps(backbone: nn.Module, weights: Dict[str, Tensor], prefix: str, *_: Any) -> None:
    """mmengine logs keys that do not fit and goes on, with random weights; here that ends in an error."""
    own = {f'{prefix}{key}': value for key, value in backbone.state_dict().items()
           if f'{prefix}{key}' in weights or not key.endswith('num_batches_tracked')}
    norms = {key for key in own if key.startswith(f'{prefix}output_norms.')}
    if not norms & weights.keys():
        own = {key: value for key, value in own.items() if key not in norms}
    # Weights that this backbone was built without may be there: mmengine logs them.
    given = {key: value for key, value in weights.items() if key.startswith(prefix) and (
        key in own or not (key.startswith(f'{prefix}head.') or backbone._not_built(key.removeprefix(prefix))))}
    problems = differences(own, given)
    if problems:
        raise WeightsError(f"not a checkpoint of this {type(backbone).__name__} backbone: {'; '.join(problems)}")


def _guard_parent(parent: nn.Module, name: str, module: Optional[nn.Module]) -> None:
    """A detector or segmenter that gets one of these backbones refuses gaps, too, and explains sizes that clash."""
    if name == 'backbone' and isinstance(module, DenseBackbone) and isinstance(parent, BaseModel):
        guard(parent)
        if any(getattr(part, 'exact_size', True) is False for part in module.modules()):
            parent.register_forward_hook(_explain_sizes, with_kwargs=True, always_call=True)


def _explain_sizes(model: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], *_: Any) -> None:
    """Name the option that helps where a neck or head fails on maps that the backbone rounded up."""
    error = sys.exc_info()[1]
    images = kwargs.get('inputs', args[0] if args else None)
    if not isinstance(error, (RuntimeError, AssertionError)) or not isinstance(images, Tensor):
        return
    rounded = any(-(-side // stride) % 2 for stride in (8, 16, 32) for side in images.shape[-2:])
    if rounded and (isinstance(error, AssertionError) or re.search('size|shape|dimension', str(error))):
        text = str(error) or 'sizes do not match'
        error.args = (f'{text} ({type(model.backbone).__name__} rounds maps with an odd side up; for necks and heads '
                      'that join levels of exact sizes, set model.backbone.exact_size=True or pad images to a multiple '
                      'of 64)',)


register_module_module_registration_hook(_guard_parent)


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
