"""Write checkpoints of a Runner atomically, and find them after a folder has moved."""
import contextlib
import os
import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS

from ...backbones.weights import write_atomically
from ..common.cli import UserError


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

    It looks for the best checkpoint so far in the current folder of the run.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if '://' not in str(self.out_dir) and not self.backend_args and not self.file_client_args:
            self.backend_args = dict(backend='subquad_atomic_files')

    def before_train(self, runner) -> None:
        super().before_train(runner)
        if self._is_atomic:
            self.file_backend.folder = self.out_dir
            here = Path(self.out_dir)
            if getattr(self, 'best_ckpt_path', None):
                self.best_ckpt_path = str(here / Path(self.best_ckpt_path).name)
            for name, path in getattr(self, 'best_ckpt_path_dict', {}).items():
                self.best_ckpt_path_dict[name] = path and str(here / Path(path).name)
        self._remove_replaced()

    def after_train_epoch(self, runner) -> None:
        super().after_train_epoch(runner)
        self._remove_replaced()

    def after_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        super().after_train_iter(runner, *args, **kwargs)
        self._remove_replaced()

    def after_val_epoch(self, runner, metrics: Dict[str, float]) -> None:
        super().after_val_epoch(runner, metrics)
        self._remove_replaced()

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


def latest_checkpoint(folder: Path) -> Optional[Path]:
    """Return the last checkpoint of a run, even if the folder has moved or the file last_checkpoint is damaged."""
    try:
        noted = Path((folder / 'last_checkpoint').read_text().strip())
    except (OSError, UnicodeDecodeError):
        noted = Path()
    for path in (folder / noted.name, noted):                    # this folder first: it can be a copy
        if noted.name and path.is_file():
            return path
    numbered = [(int(match[1]), path) for path in folder.glob('*.pth')
                if (match := re.fullmatch(r'(?:epoch|iter)_(\d+)', path.stem))]
    return max(numbered)[1] if numbered else None


def stamp(path: Optional[Path]) -> Optional[Tuple[Path, int]]:
    """Return a checkpoint and its time of writing, or None for None."""
    return None if path is None else (path, path.stat().st_mtime_ns)


def checkpoint_since(folder: Path, earlier: Optional[Tuple[Path, int]]) -> Optional[Path]:
    """Return the last checkpoint of a run, or None if its `stamp` is that of an earlier run in the folder."""
    path = latest_checkpoint(folder)
    return path if stamp(path) != earlier else None


def checkpoint_to_resume(work_dir: str, name: str) -> str:
    """Return the checkpoint to resume from, after checking that it holds weights and state and no code.

    Args:
        work_dir: Folder of the run.
        name: A checkpoint, or '' for the last one of the run.

    Raises:
        UserError: There is no checkpoint, or a Runner did not write it.
    """
    from ...backbones.weights import WeightsError, read_checkpoint
    folder = Path(work_dir).expanduser()
    path = Path(name).expanduser() if name else latest_checkpoint(folder)
    if path is None:
        raise UserError(f'--resume: no checkpoint in {work_dir} (give --work-dir or --resume CHECKPOINT)')
    if name and not path.is_file() and (folder / path.name).is_file():
        path = folder / path.name                                # the config can be older than a move of the folder
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
