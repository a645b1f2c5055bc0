"""Run training from a config, explain its errors, and clean up if it fails before the first step."""
import contextlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

from ...common import images
from ...common.cli import UserError, quiet
from ..checkpoints.earlier_runs import EARLIER
from ..config import check_training, is_classifier
from .lock import locked


def run_training(config, work_dir: str, log_level: str = 'ERROR', weights: Optional[str] = None,
                 command: str = '') -> Path:
    """Train, and return the path of the best weights in validation, or of the last ones without validation.

    Args:
        config: MMEngine Config.
        work_dir: Folder for all files; no other training may write to it.
        log_level: Level of MMEngine's logger.
        weights: File that a detector or segmenter starts from (for a classifier: `load_from` of the config).
        command: Command that resumes this training after an interruption, for messages.

    Raises:
        UserError: The config, the data or the folder cannot be used, or a package is missing, and nothing has been
            written; or the training stopped because the loss is not finite or the disk is full. A library can raise
            another error.
        Interrupted: A signal stopped the training.
    """
    from mmengine.dist import is_main_process

    from ..weights.starting_weights import without_pretrained
    folder = Path(work_dir).expanduser()
    if weights and not is_classifier(config):
        config.load_from = None
        without_pretrained(config.model)
    check_training(config)
    vet_pretrained(config)
    first = int(os.environ.get('RANK', 0)) == 0
    with locked(folder) if first else contextlib.nullcontext():
        kept = _train(config, folder, log_level, weights, command)
    if is_main_process():
        print(f'weights: {kept}')
    return kept


def _train(config, folder: Path, log_level: str, weights: Optional[str], command: str) -> Path:
    """Run the training in a folder that is locked."""
    from mmengine.dist import is_main_process

    from ..checkpoints.interruptions import Interrupted, InterruptionHook
    from ..weights.starting_weights import StartHook, starting_point
    from .hooks import ProgressHook, WeightsHook
    from .messages import resume_hint
    from .runner import build_runner
    from .step_times import StepTimesHook
    interruption, times = InterruptionHook(), StepTimesHook()
    hooks = [ProgressHook(starting_point(config, weights), times), WeightsHook(), interruption, times]
    if weights and not is_classifier(config):
        hooks.append(StartHook(weights))
    progress, kept = hooks[:2]
    before = _contents(folder) if folder.is_dir() else {}

    def hint() -> str:
        return resume_hint(folder, command, progress.started, config.load_from if config.get('resume') else '')
    unreadable = images.reported()
    try:
        with quiet() if log_level == 'ERROR' else contextlib.nullcontext():
            with interruption.listening():
                build_runner(config, str(folder), training=True, hooks=hooks, log_level=log_level).train()
    except KeyboardInterrupt:
        progress.stop()
        if is_main_process():
            print(hint(), file=sys.stderr)
            if not progress.started:
                _undo(folder, before)
        raise
    except Exception as error:
        progress.stop()
        if interruption.number is not None and 'DataLoader worker' in str(error):
            # The signal was sent to the workers, too, which it ends.
            if is_main_process():
                print(hint(), file=sys.stderr)
            raise Interrupted(interruption.number) from error
        if is_main_process() and not progress.started:
            # MMEngine builds many parts only now; no step has run, so there is nothing to keep.
            _undo(folder, before)
        explained = _explained(error, folder, hint() if progress.started else '')
        if explained is None:
            raise
        raise explained from error
    finally:
        progress.stop()
    images.say_count(unreadable)
    return folder / (kept.best_file or kept.last_file).name


def _explained(error: Exception, folder: Path, hint: str) -> Optional[UserError]:
    """Return the error of a training run as a UserError that says more than its message, or None.

    Args:
        error: Error of the run.
        folder: Folder of the run.
        hint: How to resume; '' for a run that has not started.
    """
    from .messages import disk_full
    outside = re.search(r'Target (\d+) is out of bounds', str(error))
    if outside:
        return UserError(f'a label map has label {outside[1]}, but the data set has fewer classes')
    if 'device-side assert' in str(error):
        return UserError('an index is out of range on the GPU, most likely a label for which the model has no class; '
                         'with the environment variable CUDA_VISIBLE_DEVICES= training runs on the CPU, which names it'
                         f"{hint and f'; {hint}'}")
    full = disk_full(error)
    if full:
        return UserError(f"{full} while writing to {folder}; free some space{hint and f'; {hint}'}")
    return None


def vet_pretrained(config) -> None:
    """Refuse starting weights that could run code: MMEngine reads a pickle without protection if the safe way fails.

    Published weights are downloaded, so that a failure comes before anything is written.

    Raises:
        UserError: A file could run code, is missing or is damaged, or a download failed.
    """
    from ....backbones.weights import WeightsError, read_checkpoint
    from ....backbones.weights.resolve import SCHEME, resolve
    for path in _pretrained(config.to_dict()):
        if '://' in path and not path.startswith(SCHEME):    # an address that MMEngine resolves
            continue
        try:
            read_checkpoint(resolve(path))
        except WeightsError as error:
            raise UserError(str(error)) from error


def _pretrained(value: Any) -> Iterator[str]:
    """Yield the files that init_cfg and load_from name."""
    if isinstance(value, dict):
        for key in ('load_from', 'checkpoint'):
            path = value.get(key)
            if isinstance(path, str) and path and (key == 'load_from' or value.get('type') == 'Pretrained'):
                yield path
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _pretrained(item)


def _contents(folder: Path) -> Dict[Path, Optional[bytes]]:
    """Return the paths in the folder, with the bytes of the small files that a start overwrites."""
    return {path: path.read_bytes() if _is_overwritten(path) else None for path in folder.iterdir()}


def _is_overwritten(path: Path) -> bool:
    """Whether a Runner writes a file before the first step: the config, and the list of earlier checkpoints."""
    return path.suffix == '.py' or path.name == EARLIER


def _undo(folder: Path, before: Dict[Path, Optional[bytes]]) -> None:
    """Remove what a Runner writes before the first step, and restore the files that it has overwritten."""
    for path in set(folder.iterdir()) - set(before):
        if path.is_dir() and re.fullmatch(r'\d{8}_\d{6}', path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _is_overwritten(path):
            path.unlink()
    for path, content in before.items():
        if content is not None:
            path.write_bytes(content)
