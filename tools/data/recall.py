"""Generate multi-query associative recall (MQAR): pairs of a key and a value, then keys whose values are asked for.

The task is from Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", arXiv 2312.04927.
A sequence starts with `pairs` keys, each followed by its value. Each key occurs once more, as a query, and the label of
the query is the value. Keys are the tokens 1 to V/2 - 1 of a vocabulary of V, values the tokens V/2 to V - 1.

Queries stand at even distances from the pairs. Place i = 0, 1, ... of them is drawn with a probability in proportion to
(i + 1)^(power - 1), without replacement, so that with a small power most queries come soon. Adding Gumbel noise to the
logarithms of the probabilities and taking the largest sums draws all sequences of a block at once.
"""
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Union

import numpy as np

from ..common.cli import UserError
from .generated import already_there, check_least, written_folder

FILLERS = ('zero', 'random')
FORMAT = 1              # of the files; increases if the same options generate other ones

_BLOCK = 1024           # sequences that are drawn at once; changing it changes the data of a seed


class Recall(NamedTuple):
    """Sequences with queries."""

    tokens: np.ndarray     # int32 (n, length)
    places: np.ndarray     # int64 (n, pairs), the indices of the queries in their sequence
    answers: np.ndarray    # int32 (n, pairs), the values of the queries

    @property
    def labels(self) -> np.ndarray:
        """Labels of all tokens, int32 (n, length), -100 for tokens that are not queries."""
        label = np.full_like(self.tokens, -100)
        np.put_along_axis(label, self.places, self.answers, 1)
        return label


def multi_query_recall(count: int, seed: Union[int, Sequence[int]] = 0, vocab_size: int = 8192, length: int = 64,
                       pairs: int = 4, power: float = 0.01, filler: str = 'zero') -> Recall:
    """Generate sequences. The first k of them do not depend on `count`.

    Args:
        count: number of sequences, at least 1.
        seed: any seed that numpy.random.default_rng accepts.
        vocab_size: V.
        length: number of tokens of a sequence, at least 4 * pairs.
        pairs: number of pairs, and of queries.
        power: exponent of the power law of the queries' places, above 0.
        filler: tokens without a role are 0 ('zero'), or any token of the vocabulary ('random'), also keys and values.
    """
    check_least('count', count, 1)
    check_least('pairs', pairs, 1)
    check_least('length', length, 4 * pairs, f' for pairs={pairs}')
    check_least('vocab_size', vocab_size, 2 * pairs + 2, f' for pairs={pairs}')
    if not 0 < power < float('inf'):
        raise UserError(f'power must be a positive number, got {power!r}')
    if filler not in FILLERS:
        raise UserError(f'filler must be one of {FILLERS}, got {filler!r}')
    rng = np.random.default_rng(seed)
    blocks: List[Recall] = [_block(rng, vocab_size, length, pairs, power, filler) for _ in range(-(-count // _BLOCK))]
    return Recall(*(np.concatenate(parts)[:count] for parts in zip(*blocks)))


def _block(rng: np.random.Generator, vocab_size: int, length: int, pairs: int, power: float, filler: str) -> Recall:
    """Generate _BLOCK sequences."""
    half, context = vocab_size // 2, 2 * pairs
    keys = 1 + _smallest(rng.random((_BLOCK, half - 1), np.float32), pairs)
    values = half + _smallest(rng.random((_BLOCK, vocab_size - half), np.float32), pairs)
    log_weights = (power - 1) * np.log(np.arange(1, (length - context) // 2 + 1))
    places = context + 2 * _smallest(-(log_weights + rng.gumbel(size=(_BLOCK, len(log_weights)))), pairs)
    if filler == 'zero':
        tokens = np.zeros((_BLOCK, length), np.int32)
    else:
        tokens = rng.integers(0, vocab_size, (_BLOCK, length), np.int32)
    tokens[:, 0:context:2], tokens[:, 1:context:2] = keys, values
    np.put_along_axis(tokens, places, keys.astype(np.int32), 1)
    return Recall(tokens, places, values.astype(np.int32))


def _smallest(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the smallest scores of each row, in increasing order of the scores: int64 (rows, count)."""
    found = np.argpartition(scores, count - 1, 1)[:, :count]
    order = np.argsort(np.take_along_axis(scores, found, 1), 1)
    return np.take_along_axis(found, order, 1)


def write_recall(folder: Path, options: Dict[str, Any], force: bool = False) -> bool:
    """Write train.npz and val.npz as a whole, to a new or empty folder, or with `force` over another such data set.

    `options` are train and val (numbers of sequences), seed, vocab_size, length and pairs. Returns False if the folder
    already holds this data set.
    """
    layout = {'{train,val}.npz': 'inputs (n, length) and label (n, length), int32; -100 for tokens without a label'}
    metadata = dict(dataset='mqar', format=FORMAT, options=options, layout=layout)
    if already_there(folder, metadata, lambda _: {'train.npz', 'val.npz'}, force):
        return False
    sizes = {name: options[name] for name in ('vocab_size', 'length', 'pairs')}
    with written_folder(folder, metadata) as new:
        for stream, part in enumerate(('train', 'val')):         # as in the data set that configs name
            made = multi_query_recall(options[part], [options['seed'], stream], **sizes)
            np.savez(new / f'{part}.npz', inputs=made.tokens, label=made.labels)
    return True
