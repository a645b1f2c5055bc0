"""What every Runner here needs: parts built with errors that name them, and processes that find each other."""
import os
from copy import deepcopy
from typing import Any, Callable, Dict, Optional

import torch
from mmengine.config import Config
from mmengine.registry import Registry

from ..common.cli import UserError, one_line


def build(registry: Registry, config: Optional[Dict[str, Any]], name: str) -> Any:
    """registry.build of a copy of the config, its errors as by `made`."""
    # Of a copy: DINO, for one, writes into its config, which goes to the work folder and could not be built again.
    return made(lambda: registry.build(deepcopy(config)), name)


def made(make: Callable[[], Any], name: str) -> Any:
    """make(), its errors as a UserError that names the part of the config."""
    try:
        return make()
    except UserError:
        raise
    except Exception as error:
        # mmengine wraps what a constructor raised in another exception of the same kind.
        cause = error.__cause__ or error.__context__
        if isinstance(cause, UserError):
            raise UserError(f'{name}: {cause}') from error
        raise UserError(f'{name}: {one_line(error)}') from error


def process_options(config: Config) -> Dict[str, Any]:
    """What a Runner is told of its processes. Under torchrun, which sets RANK and WORLD_SIZE, they are joined here
    where there is no GPU: mmengine chooses a GPU before it joins them."""
    launcher = config.get('launcher', 'none')
    if launcher == 'none' and 'RANK' in os.environ and 'WORLD_SIZE' in os.environ:
        launcher = 'pytorch'
    gpu = torch.cuda.is_available()
    environment = dict(config.get('env_cfg', {}))
    environment['dist_cfg'] = {**environment.get('dist_cfg', {}), 'backend': 'nccl' if gpu else 'gloo'}
    if launcher == 'pytorch' and not gpu:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group('gloo')
        config.sync_bn = None                     # there is none for CPUs
        config.setdefault('model_wrapper_cfg', dict(
            type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False,
            find_unused_parameters=config.get('find_unused_parameters', False)))
    return dict(launcher=launcher, env_cfg=environment)
