"""Run training from a config, explain its errors, and clean up if it fails before the first step."""
import contextlib
import errno
import os
import re
import shlex
import shutil
import socket
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence, Set

from mmengine.dist import is_main_process

from ....backbones.weights import WeightsError, read_checkpoint
from ....backbones.weights.resolve import SCHEME, resolve
from ...common import images
from ...common.cli import UserError, quiet
from ...common.paths import writable_folder
from ..checkpoints.interruptions import InterruptionHook
from ..checkpoints.runner_checkpoints import EARLIER, latest_checkpoint
from ..config import is_classifier
from ..weights.starting_weights import StartHook, without_pretrained
from .hooks import WeightsHook
from .progress import ProgressHook
from .runner import build_runner

_FULL = {errno.ENOSPC: 'the disk is full', errno.EDQUOT: 'the disk quota is used up',
         errno.EFBIG: 'a file grew beyond the largest size allowed'}


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
        Interrupted: A signal stopped the training.
    """
    folder, start = Path(work_dir).expanduser(), weights if weights and not is_classifier(config) else None
    if start:
        config.load_from = None
        without_pretrained(config.model)
    _vet_pretrained(config.to_dict())
    progress, kept, interruption = ProgressHook(weights), WeightsHook(), InterruptionHook()
    hooks = [progress, kept, interruption, *([StartHook(start)] if start else [])]
    unreadable = images.reported()
    with _locked(folder) if int(os.environ.get('RANK', 0)) == 0 else contextlib.nullcontext():
        before = set(folder.iterdir()) if folder.is_dir() else set()
        try:
            with quiet() if log_level == 'ERROR' else contextlib.nullcontext(), interruption.listening():
                build_runner(config, str(folder), training=True, hooks=hooks, log_level=log_level).train()
        except (Exception, KeyboardInterrupt) as error:
            progress.stop()
            hint = _resume_hint(folder, command, progress.started, config.load_from if config.get('resume') else '')
            if is_main_process() and not progress.started:
                _undo(folder, before)
            if isinstance(error, KeyboardInterrupt):
                if is_main_process():
                    print(hint, file=sys.stderr)
                raise
            explained = _explained(error, folder, f'; {hint}' if progress.started else '')
            if explained is None:
                raise
            raise UserError(explained) from error
    images.say_count(unreadable)
    path = folder / (kept.best_file or kept.last_file).name
    if is_main_process():
        print(f'weights: {path}')
    return path


def resume_command(argv: Sequence[str], args: Namespace, work_dir: str) -> str:
    """Return the command that resumes a run in a folder: `argv` are the words after `subquad train`, `args` parsed."""
    here, machines = (os.environ.get(name) for name in ('LOCAL_WORLD_SIZE', 'GROUP_WORLD_SIZE'))
    launcher = ['subquad']
    if here and 'TORCHELASTIC_RUN_ID' in os.environ:
        several = ['--nnodes', machines, '--node_rank', os.environ['GROUP_RANK'], '--master_addr',
                   os.environ['MASTER_ADDR'], '--master_port', os.environ['MASTER_PORT']] if machines != '1' else []
        launcher = ['torchrun', '--nproc_per_node', here, *several, '-m', 'subquad']
    words = [word for word in argv if word not in ('--resume', args.resume or '--resume')]
    return shlex.join([*launcher, 'train', *words, *([] if args.work_dir else ['--work-dir', work_dir]), '--resume'])


def _resume_hint(folder: Path, command: str, started: bool, resumed: str) -> str:
    """Say how to continue after training has stopped.

    Checkpoints in the folder are the run's own if it has taken a step (`started`). `resumed` is
    the checkpoint from which it continues.
    """
    path = latest_checkpoint(folder) if started else None
    if path is None and resumed:
        path, command = resumed, command and f'{command} {shlex.quote(str(resumed))}'
    if path is None:
        return f'no checkpoint has been written to {folder} yet; start the training again'
    return f'training state saved in {path}' + (f'; resume with: {command}' if command else '')


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against a second run; create the folder if it is missing, and remove it if it stays empty.

    The lock belongs to the process and ends with it; a lock file that remains has no effect.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = writable_folder(str(folder)) / 'training.lock'
    try:
        with _lock_file(path):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        for each in made:
            with contextlib.suppress(OSError):                   # not empty
                each.rmdir()


def _lock_file(path: Path) -> Any:
    """Return an open file that this process has locked; where the system has no locks, it is not locked."""
    try:
        file = open(path, 'a+')
    except OSError as error:
        raise UserError(f'cannot write {path} ({error.strerror})') from error
    try:
        import fcntl
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read() or 'just started'
        file.close()
        raise UserError(f'another run is writing to {path.parent} ({holder}); wait until it finishes, or use another '
                        '--work-dir') from error
    except (OSError, ImportError) as error:
        print(f'warning: {path.parent} cannot be locked ({getattr(error, "strerror", None) or error}): nothing stops a '
              'second run in it', file=sys.stderr)
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()}')
    file.flush()
    return file


def _explained(error: BaseException, folder: Path, hint: str) -> Optional[str]:
    """Return a sentence that says more than the message of an error of training, or None."""
    outside = re.search(r'Target (\d+) is out of bounds', str(error))
    if outside:
        return f'a label map has label {outside[1]}, but the data set has fewer classes'
    if 'device-side assert' in str(error):
        return ('an index is out of range on the GPU, most likely a label for which the model has no class; with the '
                f'environment variable CUDA_VISIBLE_DEVICES= training runs on the CPU, which names it{hint}')
    while error is not None:
        number = re.search(r'os error (\d+)', str(error))                       # of safetensors
        full = _FULL.get(int(number[1]) if number else getattr(error, 'errno', None))
        if full:
            return f'{full} while writing to {folder}; free some space{hint}'
        error = error.__cause__ or error.__context__
    return None


def _vet_pretrained(value: Any) -> None:
    """Refuse files of init_cfg that could run code: MMEngine reads a pickle without protection if the safe way fails.

    Published weights are downloaded, so that a failure comes before anything is written.
    """
    if isinstance(value, dict):
        path = value.get('checkpoint') if value.get('type') == 'Pretrained' else None
        if path and (path.startswith(SCHEME) or '://' not in path):      # MMEngine resolves other addresses
            try:
                read_checkpoint(resolve(path))
            except WeightsError as error:
                raise UserError(str(error)) from error
        value = list(value.values())
    for item in value if isinstance(value, (list, tuple)) else ():
        _vet_pretrained(item)


def _undo(folder: Path, before: Set[Path]) -> None:
    """Remove the log of a run that has taken no step, and move back the files that it has set aside."""
    for path in set(folder.iterdir()) - before:
        if path.name.startswith(EARLIER):
            for file in path.iterdir():
                file.rename(folder / file.name)
            path.rmdir()
        elif re.fullmatch(r'\d{8}_\d{6}', path.name):
            shutil.rmtree(path, ignore_errors=True)
