"""Old names of configs: they are errors that say the new ones."""
import re
from pathlib import Path

from ..common.cli import UserError
from .config import known_configs

# The first names of the segmentation configs, which did not say batch and schedule, and what stands in their place.
_RENAMED = ((r'(upernet_\w+-\w)_160k_(ade20k-512x512)', r'\1_8xb2-160k_\2'),
            (r'(upernet_\w+-\w)_160k_(cityscapes-1024x1024)', r'\1_8xb1-160k_\2'),
            (r'(\w+_mobilevitv2-\d+)_(ade20k-512x512)', r'\1_4xb4-120e_\2'),
            (r'(\w+_mobilevitv2-\d+)_(voc12-coco-512x512)', r'\1_4xb32-50e_\2'))


def refuse_old_name(name: str) -> None:
    """Do nothing, unless `name` (a name or path, with or without .py) is what a config of the package was called.

    Raises:
        UserError: it is; with the new name.
    """
    old = Path(name).name.removesuffix('.py')
    for pattern, replacement in _RENAMED:
        new = re.sub(f'^{pattern}$', replacement, old)
        if new != old and new in known_configs():
            raise UserError(f'no config file {name!r}: this config is now called {new}')
