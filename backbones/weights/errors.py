"""The error of this package, and how files are named in messages."""
from pathlib import Path
from typing import List, Union

PathLike = Union[str, Path]
SHOWN = 160


class WeightsError(ValueError):
    """A weight file that is missing, damaged, unsafe or not this model's; the message is one sentence."""


class NonFiniteError(WeightsError):
    """Weights that hold NaN or infinities."""


def shown(path: PathLike) -> str:
    """A path for messages, its middle left out where it is long."""
    text = str(path)
    return text if len(text) <= SHOWN else f'{text[:SHOWN // 2]}...{text[-SHOWN // 2:]}'


def some(items: List[str], count: int = 3) -> str:
    """The first few of a list, for messages; long items are cut."""
    return ', '.join(f'{item[:100]}...' if len(item) > 100 else item for item in items[:count]) + (
        ', ...' if len(items) > count else '')
