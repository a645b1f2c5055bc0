"""A two-way table of names of layers, for weights that are published under other names."""
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Pattern, Tuple

from .errors import WeightsError, some

# '{n}' in a name stands for a number, '{n+1}' and '{n-1}' for that number plus or minus 1.
_PLACEHOLDER = re.compile(r'\{(\w)([+-]1)?\}')


class _Name(NamedTuple):
    """One side of a row: a pattern that matches keys, and how its numbers differ from those of the row."""
    pattern: Pattern[str]
    template: str
    offsets: Tuple[Tuple[str, int], ...]


class KeyTable:
    """Rename keys of a state dict from published names to the names of this package and back.

    A row pairs the published name of a layer with the name here. What follows the name of the layer, such as
    '.weight' or '.running_mean', is the same on both sides. In either direction the first row that matches is used,
    so rows that several published names share come after the row to which the names here are translated.

    Args:
        rows: pairs (published name, name here), such as ('layers.{s}.downsample.norm', 'stages.{s+1}.downsample.norm').
    """

    def __init__(self, rows: Iterable[Tuple[str, str]]):
        self._rows: List[Tuple[_Name, _Name]] = [(_compile(theirs), _compile(ours)) for theirs, ours in rows]

    def to_ours(self, key: str) -> Optional[str]:
        """Return this package's key for a published key, or None if no row matches."""
        return next(filter(None, (_rename(key, theirs, ours) for theirs, ours in self._rows)), None)

    def to_theirs(self, key: str) -> Optional[str]:
        """Return the published key for a key of this package, or None if no row matches."""
        return next(filter(None, (_rename(key, ours, theirs) for theirs, ours in self._rows)), None)

    def all_to_theirs(self, keys: Iterable[str], publisher: str) -> Dict[str, str]:
        """Return the published key for each of this package's keys.

        Args:
            keys: the keys of a state dict.
            publisher: whose names these are, for the message.

        Raises:
            WeightsError: a key has no published name.
        """
        names = {key: self.to_theirs(key) for key in keys}
        unknown = [key for key, name in names.items() if name is None]
        if unknown:
            raise WeightsError(f'{publisher} has no name for {len(unknown)} of the keys ({some(unknown)})')
        return {key: name for key, name in names.items() if name is not None}


def _compile(name: str) -> _Name:
    pattern, template, offsets = '', '', []
    first, *rest = _PLACEHOLDER.split(name)
    for letter, offset, text in (('', '', first), *zip(rest[::3], rest[1::3], rest[2::3])):
        if letter:
            # Four digits: `int` raises an error for the thousands of digits that a damaged file can hold.
            pattern += f'(?P<{letter}>[0-9]{{1,4}})'
            template += f'{{{letter}}}'
            offsets.append((letter, int(offset or 0)))
        pattern, template = pattern + re.escape(text), template + text
    return _Name(re.compile(pattern + r'(?P<tail>(?:\.[A-Za-z_]+)?)'), template, tuple(offsets))


def _rename(key: str, source: _Name, target: _Name) -> Optional[str]:
    match = source.pattern.fullmatch(key)
    if match is None:
        return None
    numbers = {letter: int(match[letter]) - offset for letter, offset in source.offsets}
    numbers = {letter: numbers[letter] + offset for letter, offset in target.offsets}
    if min(numbers.values(), default=0) < 0:
        return None
    return target.template.format(**numbers) + match['tail']


def below(weights: Dict[str, Any], prefix: str) -> Dict[str, Any]:
    """Return the weights whose keys begin with a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def conv_and_norm(theirs: str, ours: str, conv: str = 'conv', norm: str = 'norm') -> List[Tuple[str, str]]:
    """Return the rows of a convolution and of its BatchNorm, which are `conv` and `bn` in this package."""
    return [(f'{theirs}.{conv}', f'{ours}.conv'), (f'{theirs}.{norm}', f'{ours}.bn')]
