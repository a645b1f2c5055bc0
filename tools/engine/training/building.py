"""Build the parts of a Runner with errors that name the part."""
import math
import os
from copy import deepcopy
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from mmengine.registry import Registry
from mmengine.runner import Runner

from ...common.cli import UserError, one_line


def build(registry: Registry, config: Optional[Dict[str, Any]], name: str) -> Any:
    """Return registry.build(config) for a copy of the config, with errors as from `made`."""
    # Some constructors change their config (DINO's does), which is written to the work folder afterwards.
    return made(lambda: registry.build(deepcopy(config)), name)


def made(make: Callable[[], Any], name: str) -> Any:
    """Return make(); an error becomes one that names this part of the config."""
    try:
        return make()
    except UserError:
        raise
    except Exception as error:
        # MMEngine wraps what a constructor raised in another exception of the same kind.
        cause = error.__cause__ or error.__context__
        if isinstance(cause, UserError):
            raise UserError(f'{name}: {cause}') from error
        raise UserError(f'{name}: {one_line(error)}') from error


def check_batch_size(loader: Dict[str, Any], dataset: Any, part: str) -> None:
    """Refuse a batch size that leaves no batch."""
    processes = int(os.environ.get('WORLD_SIZE', 1))
    if loader.get('drop_last') and math.ceil(len(dataset) / processes) < loader.get('batch_size', 1):
        share = f' for {processes} processes' if processes > 1 else ''
        raise UserError(f"{part}_dataloader: the data set has {len(dataset)} samples{share}, fewer than "
                        f"batch_size={loader['batch_size']}{' each' if share else ''}, and drop_last leaves none")


def close_log(runner: Runner) -> None:
    """Close the log files of a runner, to which MMEngine would write in later runs, too, and remove empty ones."""
    for handler in list(runner.logger.handlers):
        handler.close()
        runner.logger.removeHandler(handler)
        path = Path(getattr(handler, 'baseFilename', ''))
        if path.is_file() and not path.stat().st_size:
            path.unlink()
