"""Create models by name, with errors that say what a user can do."""
from typing import Any, Dict, List, Sequence, Tuple

import timm
from torch import nn

from ..common.cli import UserError, nearest

# The modules in backbones/ whose models are listed, in this order.
FAMILIES = ('ppma', 'mobilevitv2', 'myo', 'myo_sequence', 'lcsm', 'lcsm_sequence', 'rmt', 'mlla', 'vmamba', 'vim',
            'mambavision')


def our_models() -> List[str]:
    """Names of this package's models: by family and variant, small to large, test models last."""
    sizes = ('tiny', 'small', 'base')

    def place(name: str) -> Tuple[int, int, str]:
        parts = name.split('_')
        return len(parts), next((sizes.index(part) for part in parts if part in sizes), len(sizes)), name
    return [name for test in (False, True) for family in FAMILIES
            for name in sorted(timm.list_models(module=family), key=place) if name.startswith('test_') == test]


def create(name: str, **kwargs: Any) -> nn.Module:
    """Call timm.create_model without weights."""
    if not timm.is_model(name):
        known = timm.list_models()
        raise UserError(f'unknown model {name!r}{nearest(name, our_models(), 2) or nearest(name, known)}'
                        " (`subquad models` lists this package's models, `timm.list_models()` lists all)")
    try:
        return timm.create_model(name, pretrained=False, **kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f'{name}: {error}') from error


def size_options(name: str, size: Sequence[int]) -> Dict[str, Any]:
    """Options of `create` for images of `size` (height, width); models that take any size need none."""
    if timm.is_model(name) and timm.get_pretrained_cfg_value(name, 'fixed_input_size'):
        return {'img_size': tuple(size)}
    return {}


def takes_images(name: str) -> bool:
    """Whether a registered model has an input size; `lcsm_sequence` takes tokens, and has none."""
    return timm.get_pretrained_cfg_value(name, 'input_size') is not None


def default_size(name: str) -> Tuple[int, int]:
    """Height and width of a model's own input size."""
    if not timm.is_model(name):
        create(name)                                  # raises UserError with the nearest names
    if not takes_images(name):
        raise UserError(f'{name} takes tokens (B, T); this command needs a model that takes images')
    return tuple(timm.get_pretrained_cfg_value(name, 'input_size')[1:])
