"""Train with parameters that are sharded over the processes (PyTorch's fully_shard), and write ordinary checkpoints."""
import re
from collections import defaultdict
from functools import partial
from typing import Any, Callable, Dict

import torch
from mmengine.dist import get_world_size
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from ...common.cli import UserError

# Modules that are gathered one after the other; the rest of the model is gathered as a whole.
_UNITS = re.compile(r'(.+\.)?(blocks|layers)\.\d+')


@MODEL_WRAPPERS.register_module()
class FullyShardedModel:
    """The entry `model_wrapper_cfg=dict(type='FullyShardedModel')` of a config; `ShardingHook` does the sharding.

    MMEngine would wrap a model without this entry in DistributedDataParallel. It builds the optimizer, initializes the
    weights and resumes on ordinary parameters, which are sharded afterwards.
    """

    def __new__(cls, module: nn.Module) -> nn.Module:
        return module


class ShardingHook(Hook):
    """Shards parameters and optimizer state over all processes, once they are initialized or loaded."""

    priority = 'HIGH'

    def before_run(self, runner) -> None:
        if any(isinstance(hook, EMAHook) for hook in runner.hooks):
            raise UserError('FullyShardedModel does not support EMAHook and ModelEMAHook: remove one of them from the '
                            'config')

    def before_train(self, runner) -> None:
        model, optimizer = runner.model, runner.optim_wrapper.optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        mesh = init_device_mesh(next(model.parameters()).device.type, (get_world_size(),))
        for name, module in reversed(list(model.named_modules())):           # inner modules first
            if _UNITS.fullmatch(name):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded, state = dict(model.named_parameters()), defaultdict(dict)
        for group in optimizer.param_groups:
            for n, old in enumerate(group['params']):
                new = group['params'][n] = sharded[names[id(old)]]
                if old in optimizer.state:
                    state[new] = {key: _like(value, old, new) for key, value in optimizer.state[old].items()}
        optimizer.state = state


def _like(value: Any, old: Tensor, new: DTensor) -> Any:
    """Shard a tensor of the optimizer's state as its parameter is sharded."""
    if not isinstance(value, Tensor) or value.shape != old.shape:
        return value
    return distribute_tensor(value.to(new.device), new.device_mesh, new.placements)


class GatheringHook(Hook):
    """Gathers sharded tensors when a checkpoint is written, before other hooks see it."""

    priority = 'HIGHEST'

    def __init__(self):
        self.gathered: Dict[str, Any] = {}

    def before_train(self, runner) -> None:
        # MMEngine calls `save_checkpoint` in all processes, but runs it in the main process only.
        runner.save_checkpoint = partial(self._save, runner, runner.save_checkpoint)

    def _save(self, runner, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.gathered = dict(state_dict=_full(runner.model.state_dict()),
                             optimizer=_full(runner.optim_wrapper.state_dict()))
        try:
            save(*args, **kwargs)
        finally:
            self.gathered = {}

    def before_save_checkpoint(self, runner, checkpoint: Dict[str, Any]) -> None:
        for key in {'state_dict', 'optimizer'} & checkpoint.keys():
            checkpoint[key] = self.gathered[key] if self.gathered else _full(checkpoint[key])


def _full(value: Any) -> Any:
    """Gather the sharded tensors in nested dicts and lists on the CPU; all processes call it."""
    with torch.no_grad():
        return tree_map_only(DTensor, lambda tensor: tensor.full_tensor().cpu(), value)
