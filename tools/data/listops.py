"""Generate ListOps expressions: nested MIN, MAX, MED and SM over digits, whose answer is a digit.

The task is from Nangia and Bowman (2018), in the form of Long Range Arena (Tay et al., 2021;
`lra_benchmarks/data/listops.py`). At depths 1 to 9 a node is an operator of 2 to 10 arguments with probability 1/4 and
a digit otherwise; at depth 10 it is a digit. MED returns the median truncated to an integer, SM the sum modulo 10. A
digit is one token. An operator is two tokens: the opening bracket with its name, and the closing bracket. Expressions
of 500 < tokens < 2000 are kept, which are one in eleven.

Trees are sampled breadth first. This gives the same distribution as depth first and allows thousands of trees to be
sampled at once with array operations. A tree that exceeds max_length is abandoned.
"""
from dataclasses import dataclass
from typing import List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from ..common.cli import UserError
from .generated import check_least

# As many tokens as the vocabularies of S4 and S5, which have <unk>, too; it never occurs here.
VOCABULARY = ('<pad>', '<unk>', '<eos>', *'0123456789', '[MIN', '[MAX', '[MED', '[SM', ']')
PAD, EOS, DIGIT, OPERATOR, CLOSE = 0, 2, 3, 13, 17

_OPERATOR_PROBABILITY = 0.25
_TREES = 4096           # batch size of the sampling; changing it changes the data of a seed
_PATIENCE = 64          # give up after this many batches without a valid tree


@dataclass(frozen=True)
class Expressions:
    """Concatenated sequences of tokens, and their answers."""

    tokens: np.ndarray     # uint8 (sum of the lengths,), indices into VOCABULARY
    starts: np.ndarray     # int64 (n + 1,); sequence i is tokens[starts[i]:starts[i + 1]]
    answers: np.ndarray    # int64 (n,), from 0 to 9

    def __len__(self) -> int:
        return len(self.answers)

    def sequence(self, index: int) -> np.ndarray:
        """Return the tokens of one expression, uint8 (length,)."""
        return self.tokens[self.starts[index]:self.starts[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each expression, int64 (n,)."""
        return np.diff(self.starts)


def listops(count: int, seed: Union[int, Sequence[int]] = 0, min_length: int = 500, max_length: int = 2000,
            max_depth: int = 10, max_args: int = 10) -> Expressions:
    """Generate expressions with min_length < tokens < max_length.

    The first k expressions do not depend on `count`. Duplicates are not removed; beyond about 20 tokens there are none.

    Args:
        count: number of expressions, at least 1.
        seed: any seed that numpy.random.default_rng accepts.
        min_length, max_length: bounds of the number of tokens, both excluded; 50 and 128 give a short version.
        max_depth: largest depth of a tree; the outermost operator has depth 1.
        max_args: largest number of arguments of an operator; the smallest is 2.
    """
    for name, value, least in (('count', count, 1), ('min_length', min_length, 1), ('max_depth', max_depth, 2),
                               ('max_args', max_args, 2)):
        check_least(name, value, least)
    if max_length < min_length + 2:
        raise UserError(f'no length is above min_length={min_length} and below max_length={max_length}')
    rng = np.random.default_rng(seed)
    parts: List[Expressions] = []
    found = in_vain = 0
    while found < count:
        levels = _grow(rng, min_length, max_length, max_depth, max_args)
        if not len(levels[0].owner):
            in_vain += 1
            if in_vain == _PATIENCE:
                raise UserError(f'none of {_PATIENCE * _TREES} expressions of depth up to {max_depth} and with up to '
                                f'{max_args} arguments has between {min_length} and {max_length} tokens')
            continue
        in_vain = 0
        parts.append(_lay_out(rng, levels))
        found += len(parts[-1])
    lengths = np.concatenate([part.lengths for part in parts])[:count]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Expressions(np.concatenate([part.tokens for part in parts])[:starts[-1]], starts,
                       np.concatenate([part.answers for part in parts])[:count])


class _Level(NamedTuple):
    """The nodes of one depth in all trees. The arguments of an operator are consecutive nodes of the next level."""

    owner: np.ndarray          # int64 (nodes,): index of the node's tree
    is_operator: np.ndarray    # bool (nodes,)
    arguments: np.ndarray      # int64 (operators,): number of arguments of each operator

    def of(self, kept: np.ndarray) -> '_Level':
        """Return the nodes of the trees for which `kept`, bool (trees,), is true."""
        nodes = kept[self.owner]
        return _Level(self.owner[nodes], self.is_operator[nodes], self.arguments[nodes[self.is_operator]])


def _grow(rng: np.random.Generator, min_length: int, max_length: int, max_depth: int, max_args: int) -> List[_Level]:
    """Sample the shapes of _TREES random trees; return those with a valid length, level by level."""
    levels: List[_Level] = []
    owner = np.arange(_TREES)
    length = np.zeros(_TREES, np.int64)
    for depth in range(1, max_depth + 1):
        is_operator = rng.random(len(owner)) < (_OPERATOR_PROBABILITY if depth < max_depth else 0)
        arguments = rng.integers(2, max_args + 1, np.count_nonzero(is_operator))
        levels.append(_Level(owner, is_operator, arguments))
        parents = owner[is_operator]
        length += np.bincount(owner, minlength=_TREES) + np.bincount(parents, minlength=_TREES)
        # Every argument is at least one token. The length of an abandoned tree becomes an invalid one.
        length_at_least = length + np.bincount(parents, arguments, _TREES).astype(np.int64)
        length[length_at_least >= max_length] = max_length
        growing = length[parents] < max_length
        owner = np.repeat(parents[growing], arguments[growing])
        if not len(owner):
            break
    kept = (min_length < length) & (length < max_length)
    return [level.of(kept) for level in levels]


def _lay_out(rng: np.random.Generator, levels: List[_Level]) -> Expressions:
    """Sample the symbols of the nodes; compute sizes and answers bottom up, then the position of each node top down."""
    symbols: List[np.ndarray] = []
    sizes: List[np.ndarray] = []
    answer = np.zeros(0, np.int64)
    for level in reversed(levels):
        below, answer = answer, rng.integers(0, 10, len(level.owner))
        symbol, size = DIGIT + answer, np.ones_like(answer)
        if len(level.arguments):
            kind = rng.integers(0, 4, len(level.arguments))
            answer[level.is_operator] = _evaluate(kind, below, level.arguments)
            symbol[level.is_operator] = OPERATOR + kind
            size[level.is_operator] = 2 + np.add.reduceat(sizes[-1], _firsts(level.arguments))
        symbols.append(symbol)
        sizes.append(size)
    lengths = sizes[-1]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.empty(starts[-1], np.uint8)
    place = starts[:-1]
    for level in levels:
        size = sizes.pop()
        tokens[place] = symbols.pop()
        place, size = place[level.is_operator], size[level.is_operator]
        tokens[place + size - 1] = CLOSE
        if len(level.arguments):
            before = _firsts(sizes[-1])                  # tokens before this node: of all nodes, then of siblings only
            place = before + np.repeat(place + 1 - before[_firsts(level.arguments)], level.arguments)
    return Expressions(tokens, starts, answer)


def _firsts(counts: np.ndarray) -> np.ndarray:
    """Return the start of each group from the sizes of the groups."""
    return np.cumsum(counts) - counts


def _evaluate(kind: np.ndarray, values: np.ndarray, arguments: np.ndarray) -> np.ndarray:
    """Evaluate operators (n,) of kinds 0 to 3, in the vocabulary's order; `values` are their arguments in groups."""
    firsts = _firsts(arguments)
    group = np.repeat(np.arange(len(arguments)), arguments)
    ordered = np.sort(group * 10 + values) % 10                                # by value within each group
    last = firsts + arguments - 1
    median = (ordered[(firsts + last) // 2] + ordered[(firsts + last + 1) // 2]) // 2
    return np.choose(kind, [ordered[firsts], ordered[last], median, np.add.reduceat(values, firsts) % 10])


# Long Range Arena's files have parentheses around each application, which its vocabularies lack: read them as spaces.
_SPACED = bytes.maketrans(b'()', b'  ')
_NO_TOKEN, _SPACE = 255, 254
_CODES = np.full(256, _NO_TOKEN, np.uint8)
_CODES[[ord(' '), ord('\t')]] = _SPACE
_CODES[ord('0'):ord('9') + 1] = np.arange(DIGIT, DIGIT + 10)
_CODES[[1, 2, 3, 4, ord(']')]] = np.arange(OPERATOR, CLOSE + 1)
_NAMES: Tuple[Tuple[bytes, bytes], ...] = ((b'[MIN', b'\1'), (b'[MAX', b'\2'), (b'[MED', b'\3'), (b'[SM', b'\4'))


def from_text(text: bytes) -> np.ndarray:
    """Convert an expression of Long Range Arena's files to tokens, uint8 (length,); parentheses are optional.

    Raises:
        ValueError: the text is not exactly one complete expression.
    """
    for name, code in _NAMES:
        text = text.replace(name, code)
    codes = _CODES[np.frombuffer(text.translate(_SPACED), np.uint8)]
    if (codes == _NO_TOKEN).any():
        raise ValueError('a token that is not a digit, an operator or a bracket')
    is_token = codes != _SPACE
    if (is_token[1:] & is_token[:-1]).any():
        raise ValueError('tokens without a space between them')
    tokens = codes[is_token]
    opens = (tokens >= OPERATOR) & (tokens < CLOSE)
    depth = np.cumsum(opens.astype(np.int64) - (tokens == CLOSE))
    if not len(tokens) or depth[-1] != 0 or (depth[:-1] <= 0).any():
        raise ValueError('brackets that do not close one expression')
    return tokens
