"""What generated data sets share: checks of arguments, and folders that hold a whole data set or nothing."""
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Set

import numpy as np

from ..common.cli import UserError
from ..common.paths import replaced_folder

METADATA_FILE = 'dataset.json'


def check_least(name: str, value: Any, least: int, why: str = '') -> None:
    """Raise a UserError unless an argument is an integer of at least `least`."""
    if not isinstance(value, (int, np.integer)) or value < least:
        raise UserError(f'{name} must be an integer of at least {least}{why}, got {value!r}')


def already_there(folder: Path, metadata: Dict[str, Any], files: Callable[[Dict[str, Any]], Set[str]],
                  force: bool) -> bool:
    """Whether a folder already holds the whole data set with these options; `force` allows one of this kind to be
    replaced.

    Args:
        folder: Folder of the data set.
        metadata: Entries of the data set's METADATA_FILE: dataset (its name), format (a number that increases if the
            same options generate other files) and options.
        files: Returns the other files of a data set with some options, relative to its folder, with slashes.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f'{folder} is a file; give a folder')
    if not folder.exists() or not any(folder.iterdir()):
        return False
    try:
        old = json.loads((folder / METADATA_FILE).read_text(encoding='utf-8'))
        old = old if isinstance(old, dict) else {}
    except (OSError, ValueError):
        old = {}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob('*') if not path.is_dir()}
    try:
        expected = {METADATA_FILE} | files(old['options']) if old.get('dataset') == metadata['dataset'] else None
    except (KeyError, TypeError):
        expected = None
    if expected is None or there - expected:
        example = f', such as {min(there - expected)}' if expected else ''
        raise UserError(f'{folder} holds other files{example}: give a new or empty folder')
    if force:
        return False
    if any(old.get(key) != metadata[key] for key in metadata):
        other = [f'{key} {_text(old["options"].get(key))}, not {_text(value)}'
                 for key, value in metadata['options'].items() if old['options'].get(key) != value]
        raise UserError(f"{folder} holds a data set with other options ({'; '.join(other) or 'of another version'}): "
                        'give --force to replace it, or another folder')
    if expected - there:
        raise UserError(f'{folder} lacks files of its data set, such as {min(expected - there)}: give --force to '
                        'generate it again')
    return True


@contextmanager
def written_folder(folder: Path, metadata: Dict[str, Any]) -> Iterator[Path]:
    """Give an empty folder to fill, and put it in the place of `folder` with a METADATA_FILE."""
    try:
        with replaced_folder(folder) as new:
            yield new
            text = json.dumps(metadata, indent=2, ensure_ascii=False) + '\n'
            (new / METADATA_FILE).write_text(text, encoding='utf-8')
    except OSError as error:
        raise UserError(f'cannot write to {folder} ({error.strerror or error})') from error


def _text(option: Any) -> str:
    return 'x'.join(map(str, option)) if isinstance(option, list) else str(option)
