"""Backbones for MMDetection and MMSegmentation configs, such as `dict(type='PPMA', arch='tiny')`."""
import re
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from mmengine.logging import print_log
from mmengine.model import BaseModel, BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_module_registration_hook

from .. import lcsm, mambavision, mlla, mobilevitv2, myo, ppma, rmt, vim, vmamba
from ..weights import WeightsError, check_finite, differences, load_state_dict, read_file, some
from ..weights.key_table import below
from ..weights.resolve import refuse_hybrid, resolve
from . import cvnets
from .checkpoints import BACKBONE, WeightsComparison, make_loading_strict

# The epsilon of the output norms, as in the published detectors. Norms inside the networks use 1e-6.
NORM_EPS = 1e-5
Arch = Union[str, Dict[str, Any]]


class DenseBackbone:
    """Base class of the backbones: adds what detectors and segmenters need to a family's network.

    The state dict has the same keys as the family's classifier.

    All ways to load weights are strict (`init_cfg`, the `load_from` and `resume` of a Runner, `load_state_dict`): a
    backbone key that is missing, unknown or has another shape raises `WeightsError`, and nothing is loaded. The output
    norms may be missing, all at once, because a classifier's file has none. The file may have stages and output norms
    that `out_indices` leaves out, and a classifier's head. A detector or segmenter with this backbone is loaded
    strictly, too; see `subquad.backbones.mm.checkpoints.make_loading_strict`.

    Args:
        arch: the name of one of the family's networks, or a dict of the family's options.
        out_indices: the stages whose outputs are returned, in increasing order. Stages after the last are not built.
        output_norms: put a LayerNorm on each returned level.
        frozen_stages: -1 freezes nothing, 0 the stem, n the stem and the first n stages. Frozen parts get no gradients
            and stay in evaluation mode. Output norms are never frozen.
        norm_eval: keep the statistics of BatchNorm fixed in training.
        with_cp: use activation checkpointing.
        drop_path_rate: the rate of stochastic depth. None keeps the network's own.
        init_cfg: MMEngine's. `dict(type='Pretrained', checkpoint=FILE, prefix=None, weights=None)` accepts every file
            that `subquad.backbones.weights.read_file` reads: a classifier's, or a detector's, whose backbone is taken.
            It also accepts the name of published weights, such as 'subquad://ppma_tiny.in1k'. If a file holds averaged
            weights, too, `weights='averaged'` takes these; PPMA's authors start detectors from the raw ones.
        options: options of the family.

    Attributes:
        load_summary: a sentence that says which weights `init_cfg` loaded from which file; None before loading.

    Raises:
        ValueError: the value of an argument is not allowed.
        TypeError: an option is unknown.
    """

    family: type
    archs: Dict[str, Dict[str, Any]] = {}
    load_summary: Optional[str] = None

    def __init__(self, arch: Arch = 'tiny', out_indices: Sequence[int] = (0, 1, 2, 3), output_norms: bool = True,
                 frozen_stages: int = -1, norm_eval: bool = False, with_cp: bool = False,
                 drop_path_rate: Optional[float] = None,
                 init_cfg: Union[None, Dict[str, Any], List[Dict[str, Any]]] = None, **options: Any):
        if isinstance(arch, str) and arch not in self.archs:
            raise ValueError(f"arch must be one of {', '.join(map(repr, self.archs))} or a dict, got {arch!r}")
        for cfg in _listed(init_cfg):             # wrong arguments are an error here, not when weights are loaded
            if not isinstance(cfg, dict):
                raise TypeError("init_cfg must be a dict such as dict(type='Pretrained', checkpoint=FILE) or a list of "
                                f'them, got {init_cfg!r}')
            if _is_pretrained(cfg):
                _PretrainedInit(**{key: value for key, value in cfg.items() if key != 'type'})
        options = {**(self.archs[arch] if isinstance(arch, str) else arch), **options}
        if drop_path_rate is not None:
            options['drop_path_rate'] = drop_path_rate
        if issubclass(self.family, ppma.HierarchicalBackbone):
            options['head_hidden_size'] = None
        super().__init__(num_classes=0, **options)
        count = len(self.feature_info)
        indices = [out_indices] if isinstance(out_indices, int) else list(out_indices)
        if not indices or indices != sorted(set(indices)) or not all(i in range(count) for i in indices):
            raise ValueError(f'out_indices must be increasing stage numbers from 0 to {count - 1}, got '
                             f'{out_indices!r}')
        if frozen_stages not in range(-1, count + 1):
            raise ValueError(f'frozen_stages must be from -1 to {count}, got {frozen_stages!r}')
        if output_norms:
            self.output_norms = nn.ModuleList(
                nn.LayerNorm(info['num_chs'], eps=NORM_EPS) if i in indices else nn.Identity()
                for i, info in enumerate(self.feature_info))
        self.num_stages = count
        self.prune_intermediate_layers(indices)
        del self.num_classes      # mmdet's NumClassCheckHook would compare it with the data set's classes
        self.out_indices, self.frozen_stages, self.norm_eval = tuple(indices), frozen_stages, norm_eval
        self.out_channels = [self.feature_info[i]['num_chs'] for i in indices]
        self.out_strides = [self.feature_info[i]['reduction'] for i in indices]
        self.init_cfg = init_cfg
        self.set_grad_checkpointing(with_cp)
        self.register_load_state_dict_pre_hook(DenseBackbone.check_complete)
        for module in self._frozen():
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tuple[Tensor, ...]:
        """Return the feature maps of the stages in `out_indices`.

        Args:
            x: images (B, in_chans, H, W).

        Returns:
            One map (B, C, H / stride, W / stride) for each stage; sizes are rounded up.
        """
        maps = self.forward_intermediates(x, list(self.out_indices), norm=True, stop_early=True,
                                          intermediates_only=True)
        # The maps are channels-last and convolutions keep this layout. mmcv's RoIAlign ignores strides, so it would
        # pool wrong regions without an error.
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
        """Initialize from `init_cfg`. Without it the weights keep the initial values of the family."""
        if self.is_init:
            return
        given, cfgs = self.init_cfg, _listed(self.init_cfg)
        pretrained = [cfg for cfg in cfgs if _is_pretrained(cfg)]
        # Pretrained weights are loaded last, but before MMEngine logs the origin of each parameter.
        self.init_cfg = [*(cfg for cfg in cfgs if cfg not in pretrained),
                         *({**cfg, 'type': _PretrainedInit} for cfg in pretrained)]
        try:
            super().init_weights()
        finally:
            self.init_cfg = given

    def load_pretrained(self, checkpoint: str, prefix: Optional[str] = None, weights: Optional[str] = None) -> None:
        """Load the backbone from the file of a classifier or detector. All weights are loaded, or none.

        Args:
            checkpoint: the path of the file or the name of published weights; see `subquad.backbones.weights.resolve`.
            prefix: load only keys that begin with this, such as 'backbone.'. By default a detector's prefix is found.
            weights: 'raw' or 'averaged'; see `subquad.backbones.weights.read_file`. None prefers the raw weights.

        Raises:
            WeightsError: the file cannot be read, or belongs to another network. The message names keys and shapes.
        """
        refuse_hybrid(checkpoint, getattr(self, 'hybrid_options', {}))
        content = read_file(resolve(checkpoint), weights, preferred='raw')
        given = content.weights
        if prefix:
            prefix = prefix.rstrip('.') + '.'
            given = below(given, prefix)
            if not given:
                first = sorted({key.split('.')[0] + '.' for key in content.weights})
                raise WeightsError(f'{checkpoint} has no keys that begin with {prefix!r}; its keys begin with '
                                   f'{some(first, 6)}')
        check_finite(given, str(checkpoint))
        load_state_dict(self, given, str(checkpoint))
        self._log_loaded(given, f'{checkpoint}{f" ({prefix})" if prefix else ""}', content.choice)

    def _log_loaded(self, weights: Dict[str, Tensor], name: str, choice: str) -> None:
        """Log which weights were loaded, as a summary and for each parameter."""
        # The prefix of the backbone in a detector's file.
        inner = next((name for name in (BACKBONE, cvnets.ENCODER) if any(key.startswith(name) for key in weights)), '')
        given = super().translate_checkpoint(below(weights, inner))
        own = self.state_dict()
        unused = [key for key in given if key not in own] + [key for key in weights if not key.startswith(inner)]
        comparison = WeightsComparison({key: value for key, value in given.items() if key in own},
                    [key for key in own if key not in given], unused, [])
        self.load_summary = '; '.join(filter(None, [
            f'{type(self).__name__} backbone: {comparison.summary(name)}', choice]))
        for key, parameter in self.named_parameters():
            info = getattr(self, '_params_init_info', {}).get(parameter)
            if info is not None:                         # MMEngine writes this entry to the log
                info['init_info'] = f'Loaded from {name}' if key in given else f'Initial value, not in {name}'
                # MMEngine compares this mean later; without an update it would report the parameter as changed.
                info['tmp_mean_value'] = parameter.data.mean().cpu()
        print_log(self.load_summary, logger='current')

    def check_complete(self, weights: Dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Check that the weights whose keys have this prefix are all weights of this backbone.

        MMEngine only logs the differences.

        Raises:
            WeightsError: keys are missing or unknown, or shapes differ.
        """
        own = {f'{prefix}{key}': value for key, value in self.state_dict().items()
               if f'{prefix}{key}' in weights or not key.endswith('num_batches_tracked')}
        norms = {key for key in own if key.startswith(f'{prefix}output_norms.')}
        if not norms & weights.keys():
            own = {key: value for key, value in own.items() if key not in norms}
        # MMEngine logs weights of parts that this backbone was built without.
        given = {key: value for key, value in weights.items() if key.startswith(prefix) and (
            key in own or not (key.startswith(f'{prefix}head.')
                               or self._not_built(key.removeprefix(prefix))))}
        problems = differences(own, given)
        if problems:
            raise WeightsError(f'not a checkpoint of this {type(self).__name__} backbone: '
                               + '; '.join(problems))

    def skipped_keys(self, weights: Dict[str, Any]) -> List[str]:
        """List the keys that `translate_checkpoint` drops because `out_indices` leaves their stages out."""
        return [key for key in super().translate_checkpoint(weights) if self._not_built(key)]

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Translate keys as the family does, and drop the stages and output norms that `out_indices` leaves out."""
        weights = super().translate_checkpoint(weights)
        return {key: value for key, value in weights.items() if not self._not_built(key)}

    def _not_built(self, key: str) -> bool:
        """True if the key belongs to a stage or output norm of the family that `out_indices` leaves out."""
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
    """Pretrained initializer of `DenseBackbone`: unlike MMEngine's, it reads safetensors and loads strictly."""

    def __init__(self, checkpoint: Any, prefix: Optional[str] = None, weights: Optional[str] = None,
                 map_location: Any = None):
        self.options = dict(checkpoint=checkpoint, prefix=prefix, weights=weights)

    def __call__(self, backbone: DenseBackbone) -> None:
        backbone.load_pretrained(**self.options)


def _listed(init_cfg: Any) -> List[Any]:
    return [init_cfg] if isinstance(init_cfg, (dict, str)) else list(init_cfg or ())


def _is_pretrained(cfg: Dict[str, Any]) -> bool:
    kind = cfg.get('type')
    return getattr(kind, '__name__', kind) in ('Pretrained', 'PretrainedInit')


def _prepare_parent(parent: nn.Module, name: str, module: Optional[nn.Module]) -> None:
    """Make a detector or segmenter that gets one of these backbones load strictly and explain size mismatches."""
    if name == 'backbone' and isinstance(module, DenseBackbone) and isinstance(parent, BaseModel):
        make_loading_strict(parent)
        if any(getattr(part, 'exact_size', True) is False for part in module.modules()):
            parent.register_forward_hook(_explain_size_mismatch, with_kwargs=True, always_call=True)


# What torch says of maps (B, C, H, W) of several sizes that are added or concatenated.
_MAPS_DIFFER = re.compile('size of tensor a .* at non-singleton dimension [23]$|Sizes of tensors must match except in '
                          'dimension 1')


def _explain_size_mismatch(model: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], *_: Any) -> None:
    """Name the option that fixes the error of a neck or head that fails on maps whose sizes were rounded up."""
    error = sys.exc_info()[1]
    images = kwargs.get('inputs', args[0] if args else None)
    if not isinstance(error, (RuntimeError, AssertionError)) or not isinstance(images, Tensor):
        return
    rounded = any(-(-side // stride) % 2 for stride in (8, 16, 32) for side in images.shape[-2:])
    text = str(error)
    if rounded and (_MAPS_DIFFER.search(text) or isinstance(error, AssertionError) and not text):
        text = text or 'sizes do not match'
        error.args = (f'{text} ({type(model.backbone).__name__} rounds odd map sizes up; for necks and heads '
                      'that need exact sizes, set model.backbone.exact_size=True or pad images to a multiple '
                      'of 64)',)


register_module_module_registration_hook(_prepare_parent)


@MODELS.register_module()
class PPMA(DenseBackbone, ppma.PPMA, BaseModule):
    """PPMA backbone with four stages at strides 4, 8, 16 and 32. See `DenseBackbone` and `subquad.backbones.PPMA`."""

    family, archs = ppma.PPMA, ppma.ARCHS


@MODELS.register_module()
class RMT(DenseBackbone, rmt.RMT, BaseModule):
    """RMT backbone with four stages at strides 4, 8, 16 and 32. See `DenseBackbone` and `subquad.backbones.RMT`."""

    family, archs = rmt.RMT, rmt.ARCHS


@MODELS.register_module()
class MLLA(DenseBackbone, mlla.MLLA, BaseModule):
    """MLLA backbone with four stages at strides 4, 8, 16 and 32. See `DenseBackbone` and `subquad.backbones.MLLA`."""

    family, archs = mlla.MLLA, mlla.ARCHS


@MODELS.register_module()
class MambaVision(DenseBackbone, mambavision.MambaVision, BaseModule):
    """MambaVision backbone with four stages at strides 4, 8, 16 and 32.

    The published detectors and segmenters have other values of `window_size` than the classifiers. See `DenseBackbone`
    and `subquad.backbones.MambaVision`.
    """

    family, archs = mambavision.MambaVision, mambavision.ARCHS


@MODELS.register_module()
class VMamba(DenseBackbone, vmamba.VMamba, BaseModule):
    """VMamba backbone with four stages at strides 4, 8, 16 and 32.

    The name of the network has the paper's letters: s1l8 is ssm_ratio 1 and 8 blocks in the third stage. See
    `DenseBackbone` and `subquad.backbones.VMamba`.
    """

    family, archs = vmamba.VMamba, vmamba.ARCHS

    def __init__(self, arch: Arch = 'tiny_s1l8', **kwargs: Any):
        super().__init__(arch, **kwargs)


@MODELS.register_module()
class Vim(DenseBackbone, vim.Vim, BaseModule):
    """Vim backbone, whose layers all have the stride of the patches, so that a neck has to make a pyramid of them.

    `out_indices` are layers, by default the last of each quarter of them: (5, 11, 17, 23) of 24. `frozen_stages=n`
    freezes the patch embedding and the first n layers. The returned maps lack the class token and end in the network's
    last norm, so they have no output norms by default. See `DenseBackbone` and `subquad.backbones.Vim`.
    """

    family, archs = vim.Vim, vim.ARCHS

    def __init__(self, arch: Arch = 'tiny', out_indices: Optional[Sequence[int]] = None, output_norms: bool = False,
                 **kwargs: Any):
        if out_indices is None:
            out_indices = vim.quarters({**(arch if isinstance(arch, dict) else self.archs.get(arch, {})), **kwargs})
        super().__init__(arch, out_indices, output_norms, **kwargs)


@MODELS.register_module()
class Myo(DenseBackbone, myo.Myo, BaseModule):
    """Myo backbone with four stages at strides 4, 8, 16 and 32. See `DenseBackbone` and `subquad.backbones.Myo`."""

    family, archs = myo.Myo, myo.ARCHS


@MODELS.register_module()
class LCSM(DenseBackbone, lcsm.LCSM, BaseModule):
    """LCSM backbone with four stages at strides 4, 8, 16 and 32. See `DenseBackbone` and `subquad.backbones.LCSM`."""

    family, archs = lcsm.LCSM, lcsm.ARCHS


@MODELS.register_module()
class MobileViTv2(DenseBackbone, mobilevitv2.MobileViTv2, BaseModule):
    """MobileViTv2 backbone with five stages at strides 2, 4, 8, 16 and 32.

    `output_stride=16` or 8 limits the strides of the last stages. The stages end in BatchNorm, so they have no output
    norms by default. See `DenseBackbone` and `subquad.backbones.MobileViTv2`.
    """

    family, archs = mobilevitv2.MobileViTv2, mobilevitv2.ARCHS

    def __init__(self, arch: Arch = '100', out_indices: Sequence[int] = (1, 2, 3, 4), output_norms: bool = False,
                 **kwargs: Any):
        super().__init__(arch, out_indices, output_norms, **kwargs)
