"""Image sizes on the command line."""
import re
from typing import Sequence, Tuple

from .cli import UserError


def parse_size(text: str, names: Sequence[str] = (), smallest: int = 1, largest: int = 100_000) -> Tuple[int, int]:
    """Convert '256' or '96x128' (height x width) to (height, width), with sides from `smallest` to `largest`.

    `names` are other values that --size takes, for the message.
    """
    match = re.fullmatch(r'(\d{1,9})(?:x(\d{1,9}))?', text.lower(), re.ASCII)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not all(smallest <= side <= largest for side in (height, width)):
        allowed = ', '.join([*names, 'one number'])
        raise UserError(f'--size must be {allowed} or HEIGHTxWIDTH, with sides from {smallest} to {largest:,}, '
                        f'got {text!r}')
    return height, width
