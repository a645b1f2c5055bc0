"""Write checkpoints of a Runner atomically, and find them after a folder has moved."""
import contextlib
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS

from ....backbones.weights import write_atomically
from ...common.cli import UserError
from .earlier_runs import EARLIER, is_own, note_earlier, noted, number


class AtomicFilesBackend(LocalBackend):
    """The local file system, with files that are written atomically.

    `remove` waits for `remove_now`, because MMEngine removes the old checkpoint before it writes the new one and would
    leave none on a full disk.

    Args:
        folder: Only files in this folder are removed (None: any file). A copied run holds paths of the original.
    """

    def __init__(self, folder: Optional[str] = None):
        self.folder, self.pending = folder, []

    def put(self, obj: Union[bytes, memoryview], filepath: Union[str, Path]) -> None:
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as temporary, open(temporary, 'wb') as file:
            file.write(obj)
            file.flush()
            os.fsync(file.fileno())

    def remove(self, filepath: Union[str, Path]) -> None:
        path = Path(filepath)
        if self.folder is None or path.resolve().parent == Path(self.folder).resolve():
            self.pending.append((path, path.stat().st_ino))

    def remove_now(self) -> None:
        """Remove the files that were passed to `remove`, except those that have been written again since."""
        pending: List[Tuple[Path, int]] = self.pending
        self.pending = []
        for path, inode in pending:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()


register_backend('subquad_atomic_files', AtomicFilesBackend, force=True)


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """MMEngine's CheckpointHook, which writes local files atomically (`AtomicFilesBackend`).

    It looks for the best checkpoint so far in the current folder of the run. The checkpoint of an interruption is
    removed when the next one has been written. A run that starts in the folder of an earlier one notes which
    checkpoints are not its own, so that `--resume` never continues the wrong run.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.starts = True
        if '://' not in str(self.out_dir) and not self.backend_args and not self.file_client_args:
            self.backend_args = dict(backend='subquad_atomic_files')

    def before_train(self, runner) -> None:
        super().before_train(runner)
        self.starts = is_main_process()
        if self._is_atomic:
            self.file_backend.folder = self.out_dir
            here = Path(self.out_dir)
            if is_main_process():
                for name in ('*.pth', '*.safetensors', 'last_checkpoint', 'last_validation', EARLIER):
                    for part in here.glob(f'{name}*.part'):
                        part.unlink(missing_ok=True)         # a run that was killed has left it
            if getattr(self, 'best_ckpt_path', None):
                self.best_ckpt_path = str(here / Path(self.best_ckpt_path).name)
            for name, path in getattr(self, 'best_ckpt_path_dict', {}).items():
                self.best_ckpt_path_dict[name] = path and str(here / Path(path).name)
        self._remove_replaced()

    def before_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        if self.starts:
            self.starts = False
            note_earlier(Path(runner.work_dir), Path(runner._load_from) if runner._resume else None)

    def after_train_epoch(self, runner) -> None:
        super().after_train_epoch(runner)
        self._remove_replaced()

    def after_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        super().after_train_iter(runner, *args, **kwargs)
        self._remove_replaced()

    def after_val_epoch(self, runner, metrics: Dict[str, float]) -> None:
        super().after_val_epoch(runner, metrics)
        self._remove_replaced()

    def _save_checkpoint(self, runner) -> None:
        super()._save_checkpoint(runner)
        if is_main_process():
            for path in Path(runner.work_dir).glob('interrupted_*.pth'):
                path.unlink(missing_ok=True)

    @property
    def _is_atomic(self) -> bool:
        return isinstance(self.file_backend, AtomicFilesBackend)

    def _remove_replaced(self) -> None:
        if self._is_atomic and self.file_backend.pending:
            self.file_backend.remove_now()


def atomic_checkpoints(default_hooks: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """Return the default hooks of a config with AtomicCheckpointHook in place of MMEngine's CheckpointHook."""
    hooks = dict(default_hooks or {})
    checkpoint = hooks.get('checkpoint', dict(type='CheckpointHook', interval=1))
    kind = checkpoint.get('type') if isinstance(checkpoint, dict) else None
    if kind in ('CheckpointHook', 'mmengine.CheckpointHook', CheckpointHook):
        hooks['checkpoint'] = {**checkpoint, 'type': 'mmengine.AtomicCheckpointHook'}
    return hooks


def save_interrupted(runner: Any, name: str, meta: Dict[str, Any]) -> None:
    """Write the checkpoint `interrupted_NAME.pth`; all processes call it.

    Args:
        runner: The Runner.
        name: epoch_N, epoch_N_step_M or iter_N.
        meta: Entries of the checkpoint's `meta`, at least `epoch` and `iter`.
    """
    name = f'interrupted_{name}.pth'
    runner.save_checkpoint(runner.work_dir, name, meta=meta, by_epoch=False,
                           backend_args=dict(backend='subquad_atomic_files'))
    if is_main_process():
        folder = Path(runner.work_dir)
        with write_atomically(folder / 'last_checkpoint') as temporary:
            Path(temporary).write_text(str(folder / name))
        for path in folder.glob('interrupted_*.pth'):
            if path.name != name:
                path.unlink(missing_ok=True)


def _numbered(folder: Path) -> List[Tuple[Tuple[int, int, bool], Path]]:
    """Return (number, path) of all checkpoints in a folder, the highest number first."""
    return sorted(((place, path) for path in folder.glob('*.pth') if (place := number(path))), reverse=True)


def find_checkpoints(folder: Path) -> List[Path]:
    """Return the checkpoints of a run, the newest first, even if the folder has moved.

    The newest is the one that the file last_checkpoint names, or a later one: a run can be killed before it writes the
    name. Checkpoints of an earlier run in the folder are left out.
    """
    earlier = noted(folder)
    try:
        name = Path((folder / 'last_checkpoint').read_text().strip())
    except (OSError, UnicodeDecodeError):
        name = Path()
    numbered = [(place, path) for place, path in _numbered(folder) if is_own(path, earlier)]
    # This folder first: it can be a copy.
    newest = next((path for path in (folder / name.name, name) if name.name and path.is_file()
                   and is_own(path, earlier)), None)
    if newest is None:
        return [path for _, path in numbered]
    place, written = number(newest), newest.stat().st_mtime_ns
    if place is None:                                            # the config has its own names
        return [newest, *(path for _, path in numbered)]
    later = [path for n, path in numbered if n > place and path.stat().st_mtime_ns > written]
    return [*later, newest, *(path for n, path in numbered if n < place)]


def latest_checkpoint(folder: Path) -> Optional[Path]:
    """Return the newest checkpoint of a run, which may be damaged, or None."""
    return next(iter(find_checkpoints(folder)), None)


def checkpoint_to_resume(work_dir: str, name: str) -> str:
    """Return the checkpoint to resume from, after checking that it is whole and holds weights and state and no code.

    Args:
        work_dir: Folder of the run.
        name: A checkpoint, or '' for the newest one of the run. If that is damaged, the one before it is taken, and a
            line on stderr says so.

    Raises:
        UserError: There is no checkpoint, none is whole, or a Runner did not write it.
    """
    folder = Path(work_dir).expanduser()
    if name:
        path = Path(name).expanduser()
        if not path.is_file() and (folder / path.name).is_file():
            path = folder / path.name                            # the config can be older than a move of the folder
        return _whole(path)
    paths = find_checkpoints(folder)
    if not paths:
        others = [path for _, path in _numbered(folder)]
        if others:
            raise UserError(f'--resume: the last run in {work_dir} has written no checkpoint; {others[0].name} is of '
                            f'an earlier run, which --resume {others[0]} continues')
        raise UserError(f'--resume: no checkpoint in {work_dir} (give --work-dir or --resume CHECKPOINT)')
    for n, path in enumerate(paths):
        try:
            return _whole(path)
        except UserError as error:
            if n + 1 == len(paths):
                raise
            if int(os.environ.get('RANK', 0)) == 0:
                print(f'warning: {error}; trying {paths[n + 1].name}, the checkpoint before it', file=sys.stderr)
    raise AssertionError('unreachable')


def _whole(path: Path) -> str:
    """Return the path as a text.

    Raises:
        UserError: The file is not a whole checkpoint of a Runner.
    """
    from ....backbones.weights import WeightsError, read_checkpoint
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
