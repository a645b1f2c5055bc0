"""Write checkpoints of a Runner atomically, find them, and resume from the newest whole one."""
import os
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook

from ....backbones.weights import WeightsError, read_checkpoint, write_atomically
from ....backbones.weights.errors import some
from ...common.cli import UserError

# How the names of folders with the files of earlier runs begin.
EARLIER = 'earlier_'
# The file with the number of epochs before the last complete validation.
VALIDATED = 'last_validation'
# What a run leaves beside its numbered checkpoints that the next run in the folder would take for its own.
_OTHERS = ('best.safetensors', 'last_checkpoint', VALIDATED)
_NUMBERED = re.compile(r'(interrupted_)?(?:epoch|iter)_(\d+)(?:_step_(\d+))?')


class AtomicFilesBackend(LocalBackend):
    """The local file system, with files that are written atomically."""

    def put(self, obj: Union[bytes, memoryview], filepath: Union[str, Path]) -> None:
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as temporary, open(temporary, 'wb') as file:
            file.write(obj)
            file.flush()
            os.fsync(file.fileno())


register_backend('subquad_atomic_files', AtomicFilesBackend, force=True)


class AtomicCheckpointHook(CheckpointHook):
    """MMEngine's CheckpointHook, which writes local files atomically, and removes an old file after it has written the
    new one.

    It looks for the best checkpoint so far in the current folder of the run. The checkpoint of an interruption is
    removed when the next one has been written.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if '://' not in str(self.out_dir) and not self.backend_args and not self.file_client_args:
            self.backend_args = dict(backend='subquad_atomic_files')

    def before_train(self, runner) -> None:
        super().before_train(runner)
        if not isinstance(self.file_backend, AtomicFilesBackend):
            return
        here = Path(self.out_dir)
        for part in here.glob('*.part') if is_main_process() else ():
            part.unlink(missing_ok=True)                         # a run that was killed has left it
        if getattr(self, 'best_ckpt_path', None):                # the copy of a run holds paths of the original
            self.best_ckpt_path = str(here / Path(self.best_ckpt_path).name)
        for name, path in getattr(self, 'best_ckpt_path_dict', {}).items():
            self.best_ckpt_path_dict[name] = path and str(here / Path(path).name)

    def _save_checkpoint_with_step(self, runner, step: int, meta: Dict[str, Any]) -> None:
        # MMEngine removes the oldest checkpoint first, which would leave none on a full disk.
        full = 0 < self.max_keep_ckpts == len(self.keep_ckpt_ids) and self.keep_ckpt_ids[-1] != step
        oldest = self.filename_tmpl.format(self.keep_ckpt_ids.popleft()) if full else None
        super()._save_checkpoint_with_step(runner, step, meta)
        if is_main_process():
            path = oldest and self.file_backend.join_path(self.out_dir, oldest)
            if path and self.file_backend.isfile(path):
                self.file_backend.remove(path)
            for interrupted in Path(runner.work_dir).glob('interrupted_*.pth'):
                interrupted.unlink(missing_ok=True)


def save_interrupted(runner: Any, name: str, meta: Dict[str, Any]) -> None:
    """Write interrupted_epoch_N.pth, interrupted_epoch_N_step_M.pth or interrupted_iter_N.pth; all processes call it.

    `meta` has at least `epoch` and `iter`.
    """
    name = f'interrupted_{name}.pth'
    runner.save_checkpoint(runner.work_dir, name, meta=meta, by_epoch=False,
                           backend_args=dict(backend='subquad_atomic_files'))
    for path in Path(runner.work_dir).glob('interrupted_*.pth') if is_main_process() else ():
        if path.name != name:
            path.unlink(missing_ok=True)


def _number(path: Path) -> Optional[Tuple[int, int, bool]]:
    """Return (epoch or iteration, step, interrupted) from the name of a checkpoint, or None for other names."""
    match = _NUMBERED.fullmatch(path.stem)
    return (int(match[2]), int(match[3] or 0), match[1] is not None) if match else None


def set_aside(folder: Path, start: Optional[Path], name: str) -> None:
    """Move what an earlier run has left in a folder into the folder `name` in it, so that --resume never continues it.

    The checkpoints before `start`, which the run that begins continues, are of the same run.
    """
    continued = start is not None and start.resolve().parent == folder.resolve()
    last = _number(start) if continued else (-1, 0, False)
    earlier = [path for path in find_checkpoints(folder) if last and (_number(path) or last) > last or not continued]
    for path in [*earlier, *(folder / other for other in _OTHERS if not continued)]:
        if path.is_file():
            (folder / name).mkdir(exist_ok=True)
            path.rename(folder / name / path.name)
    if earlier:
        print(f'the checkpoints of an earlier run ({some(sorted(path.name for path in earlier))}) are now in '
              f'{folder / name}', file=sys.stderr)


def find_checkpoints(folder: Path) -> List[Path]:
    """Return the checkpoints of the last run in a folder, the newest first.

    If the config has its own names, it is the one that the file last_checkpoint names, even if the folder has moved.
    """
    numbered = sorted(((number, path) for path in folder.glob('*.pth') if (number := _number(path))), reverse=True)
    if numbered:
        return [path for _, path in numbered]
    try:
        name = Path((folder / 'last_checkpoint').read_text().strip()).name
    except (OSError, UnicodeDecodeError):
        return []
    return [folder / name] if name and (folder / name).is_file() else []


def latest_checkpoint(folder: Path) -> Optional[Path]:
    """Return the newest checkpoint of a run, which may be damaged, or None."""
    return next(iter(find_checkpoints(folder)), None)


def checkpoint_to_resume(work_dir: str, name: str) -> str:
    """Return the checkpoint to resume from, after checking that it is whole and holds weights and state and no code.

    Args:
        work_dir: Folder of the run.
        name: A checkpoint, or '' for the newest one of the run. If that is damaged, the one before it is taken, and a
            line on stderr says so.
    """
    folder = Path(work_dir).expanduser()
    if name:
        path = Path(name).expanduser()
        if not path.is_file() and (folder / path.name).is_file():
            path = folder / path.name                            # the config can be older than a move of the folder
        return _whole(path)
    paths = find_checkpoints(folder)
    if not paths:
        earlier = sorted(folder.glob(f'{EARLIER}*/*.pth'), key=lambda path: (path.parent, _number(path) or ()))
        if earlier:
            raise UserError(f'--resume: the last run in {work_dir} has written no checkpoint; {earlier[-1]} is of an '
                            f'earlier run, which --resume {earlier[-1]} continues')
        raise UserError(f'--resume: no checkpoint in {work_dir} (give --work-dir or --resume CHECKPOINT)')
    for path, before in zip(paths, paths[1:]):
        try:
            return _whole(path)
        except UserError as error:
            if int(os.environ.get('RANK', 0)) == 0:
                print(f'warning: {error}; trying {before.name}, the checkpoint before it', file=sys.stderr)
    return _whole(paths[-1])


def _whole(path: Path) -> str:
    """Return the path of a whole checkpoint of a Runner as a text; refuse any other file."""
    if path.suffix == '.safetensors':
        raise UserError(f'--resume: {path} holds only weights; the .pth files beside it also hold the state of '
                        'training')
    try:
        _, _, source = read_checkpoint(path)
    except WeightsError as error:
        raise UserError(f'--resume: {error}') from error
    if source != 'state_dict':
        raise UserError(f'--resume: {path} is not a checkpoint of a training run')
    return str(path)
