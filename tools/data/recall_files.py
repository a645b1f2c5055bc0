"""Write associative recall as arrays that any framework reads."""
from pathlib import Path
from typing import Any, Dict

import numpy as np

from .generated import already_there, written_folder
from .recall import Recall, multi_query_recall

FORMAT = 1                                      # increases if the same options generate other files
# Streams of the seed, as in the data set that configs name.
_STREAMS = {'train': 0, 'val': 1}
_LAYOUT = {'{train,val}.npz': 'inputs (n, length) and label (n, length), int32; -100 for tokens without a label'}


def write_recall(folder: Path, options: Dict[str, Any], force: bool = False) -> bool:
    """Write train.npz and val.npz as a whole, to a new or empty folder, or with `force` over another data set of
    recall.

    `options` are train and val (numbers of sequences), seed, vocab_size, length and pairs. Returns False if the folder
    already holds this data set.
    """
    metadata = dict(dataset='mqar', format=FORMAT, options=options, layout=_LAYOUT)
    if already_there(folder, metadata, lambda _: {f'{part}.npz' for part in _STREAMS}, force):
        return False
    sizes = {name: options[name] for name in ('vocab_size', 'length', 'pairs')}
    with written_folder(folder, metadata) as new:
        for part, stream in _STREAMS.items():
            made = multi_query_recall(options[part], [options['seed'], stream], **sizes)
            np.savez(new / f'{part}.npz', inputs=made.tokens, label=labels(made))
    return True


def labels(made: Recall) -> np.ndarray:
    """Return the labels of all tokens, int32 (n, length), -100 for tokens that are not queries."""
    label = np.full_like(made.tokens, -100)
    np.put_along_axis(label, made.places, made.answers, 1)
    return label
