"""Making models by name for the tools, with errors a user can act on."""
from typing import Any, Dict, List, Sequence, Tuple

import timm
from torch import nn

from ..common.cli import UserError, nearest

FAMILIES = ('ppma', 'mobilevitv2', 'myo', 'myo_sequence')


def our_models() -> List[str]:
    """Names of this package's models: by family, small to large, test models last."""
    sizes = ('tiny', 'small', 'base')

    def place(name: str) -> Tuple[bool, int, str]:
        size = name.rpartition('_')[2]
        return name.startswith('test_'), sizes.index(size) if size in sizes else len(sizes), name
    return [name for test in (False, True) for family in FAMILIES
            for name in sorted(timm.list_models(module=family), key=place) if name.startswith('test_') == test]


def create(name: str, **kwargs: Any) -> nn.Module:
    """timm.create_model without weights.

    Raises:
        UserError: unknown name (with the nearest ones), or an option or size that the model refuses.
    """
    if not timm.is_model(name):
        known = timm.list_models()
        raise UserError(f'unknown model {name!r}{nearest(name, our_models(), 2) or nearest(name, known)}'
                        ' (subquad models lists ours, timm.list_models() all)')
    try:
        return timm.create_model(name, pretrained=False, **kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f'{name}: {error}') from error


def size_options(name: str, size: Sequence[int]) -> Dict[str, Any]:
    """What `create` must be told for images of `size` (height, width): nothing, but for models built for one size."""
    if timm.is_model(name) and timm.get_pretrained_cfg_value(name, 'fixed_input_size'):
        return {'img_size': tuple(size)}
    return {}


def default_size(name: str) -> Tuple[int, int]:
    """Height and width that a model is made for.

    Raises:
        UserError: unknown name.
    """
    if not timm.is_model(name):
        create(name)                                  # raises, with the nearest names
    return tuple(timm.get_pretrained_cfg_value(name, 'input_size')[1:])
