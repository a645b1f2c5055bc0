"""Write associative recall as arrays that any framework reads."""
import json
from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np

from ..common.cli import UserError
from ..common.paths import replaced_folder
from .recall import Recall, multi_query_recall

FORMAT = 1                                      # increases if the same options generate other files
METADATA_FILE = 'dataset.json'
FILES = {METADATA_FILE, 'train.npz', 'val.npz'}
# Streams of the seed, as in the data set that configs name.
_STREAMS = {'train': 0, 'val': 1}
_LAYOUT = {'{train,val}.npz': 'inputs (n, length) and label (n, length), int32; -100 for tokens without a label'}


def write_recall(folder: Path, options: Dict[str, Any], force: bool = False) -> Optional[Path]:
    """Write train.npz and val.npz atomically, to a new or empty folder or over an older data set of recall.

    Args:
        folder: the folder.
        options: train and val (numbers of sequences), seed, vocab_size, length and pairs.
        force: replace a data set with other options.

    Returns:
        The folder, or None if it already holds this data set.

    Raises:
        UserError: an option is out of range, or the folder holds other files or cannot be written to.
    """
    metadata = dict(dataset='mqar', format=FORMAT, options=options, layout=_LAYOUT)
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.exists() and not folder.is_dir():
        raise UserError(f'{folder} is a file; give a folder')
    if there:
        old = _metadata(folder)
        if old is None or there - FILES:
            raise UserError(f'{folder} holds other files: give a new or empty folder')
        if not force and (old != metadata or there != FILES):
            raise UserError(f'{folder} holds a data set with other options: give --force to replace it, or another '
                            'folder')
        if not force:
            return None
    try:
        with replaced_folder(folder) as new:
            for part, stream in _STREAMS.items():
                sizes = {name: options[name] for name in ('vocab_size', 'length', 'pairs')}
                made = multi_query_recall(options[part], [options['seed'], stream], **sizes)
                np.savez(new / f'{part}.npz', inputs=made.tokens, label=labels(made))
            (new / METADATA_FILE).write_text(json.dumps(metadata, indent=2) + '\n', encoding='utf-8')
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f'cannot write to {folder} ({error.strerror or error})') from error
    return folder


def labels(made: Recall) -> np.ndarray:
    """Return the labels of all tokens, int32 (n, length), -100 for tokens that are not queries."""
    label = np.full_like(made.tokens, -100)
    np.put_along_axis(label, made.places, made.answers, 1)
    return label


def _metadata(folder: Path) -> Optional[Dict[str, Any]]:
    """Return the metadata of a data set of recall, or None if the folder holds none."""
    try:
        metadata = json.loads((folder / METADATA_FILE).read_text(encoding='utf-8'))
        return metadata if metadata['dataset'] == 'mqar' else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
