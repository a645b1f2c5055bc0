"""Optimizer wrappers: layer-wise learning rate decay, and bfloat16 training on CPUs."""
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from timm.models import group_parameters
from torch import Tensor, nn


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Optimizer wrapper constructor with layer-wise learning rate decay in the backbone.

    The learning rate of a block is base * layer_decay^n, where n is 1 for the last block and grows towards the stem.
    Output norms, neck and heads have the base learning rate. Parameters that the backbone exempts from weight decay
    have no weight decay.

    Args:
        optim_wrapper_cfg: see MMEngine's DefaultOptimWrapperConstructor.
        paramwise_cfg: MMEngine's options, and `layer_decay` (above 0 and at most 1; default 1).

    Raises:
        ValueError: layer_decay is out of range, or the backbone has no `group_matcher`.
    """

    def __init__(self, optim_wrapper_cfg: Dict[str, Any], paramwise_cfg: Optional[Dict[str, Any]] = None):
        options = dict(paramwise_cfg or {})
        self.layer_decay = options.pop('layer_decay', 1.0)
        if not isinstance(self.layer_decay, (int, float)) or not 0 < self.layer_decay <= 1:
            raise ValueError(f'layer_decay must be above 0 and at most 1, got {self.layer_decay!r}')
        super().__init__(optim_wrapper_cfg, options)

    def __call__(self, model: nn.Module) -> OptimWrapper:
        # With an empty paramwise_cfg MMEngine would put all parameters into one group.
        self.paramwise_cfg.setdefault('bypass_duplicate', False)
        return super().__call__(model)

    def add_params(self, params: List[Dict[str, Any]], module: nn.Module, prefix: str = '', **kwargs: Any) -> None:
        super().add_params(params, module, prefix=prefix, **kwargs)
        if prefix:
            return                                          # a child module; MMEngine visits the model last
        backbone = getattr(module, 'backbone', None)
        if not hasattr(backbone, 'group_matcher'):
            raise ValueError(f'LayerDecayConstructor needs a backbone with group_matcher, got '
                             f'{type(backbone).__name__}')
        factors = self._factors(backbone)
        exempt = {id(backbone.get_parameter(name)) for name in backbone.no_weight_decay()}
        for group in params:
            key = id(group['params'][0])
            group['lr'] = group.get('lr', self.base_lr) * factors.get(key, 1.0)
            if key in exempt and self.base_wd is not None:
                group['weight_decay'] = 0.

    def _factors(self, backbone: nn.Module) -> Dict[int, float]:
        """Return the factor of the learning rate for each parameter's id."""
        layer_of = group_parameters(backbone, backbone.group_matcher(coarse=False), reverse=True)
        inside = {name: layer for name, layer in layer_of.items() if not name.startswith('output_norms.')}
        above = max(inside.values()) + 1
        return {id(backbone.get_parameter(name)): self.layer_decay ** (above - layer) for name, layer in inside.items()}


@OPTIM_WRAPPERS.register_module()
class CPUAmpOptimWrapper(OptimWrapper):
    """Optimizer wrapper for bfloat16 autocast on CPUs; MMEngine's AmpOptimWrapper needs a GPU.

    In a detector or segmenter the backbone and the neck run in bfloat16. Their outputs are converted to float32,
    because mmcv's operators do not support bfloat16 on CPUs. The loss is not scaled: bfloat16 has the range of
    float32.

    Args:
        loss_scale: ignored. Configs and tools that switch to mixed precision set it.
        kwargs: arguments of OptimWrapper.
    """

    def __init__(self, loss_scale: Any = None, **kwargs: Any):
        super().__init__(**kwargs)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        inner = getattr(model, 'module', model)
        parts = [part for name in ('backbone', 'neck') if (part := getattr(inner, name, None)) is not None]
        with super().optim_context(model):
            if not parts:
                with torch.autocast('cpu', torch.bfloat16):
                    yield
                return
            for part in parts:
                part.forward = _in_bfloat16(part.forward)
            try:
                yield
            finally:
                for part in parts:
                    del part.forward                      # restore the method of the class


def _in_bfloat16(forward: Callable[..., Sequence[Tensor]]) -> Callable[..., Tuple[Tensor, ...]]:
    def run(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
        with torch.autocast('cpu', torch.bfloat16):
            maps = forward(*args, **kwargs)
        return tuple(x.float() for x in maps)
    return run
