"""Making models by name for the tools, with errors a user can act on."""
from typing import Any, Dict, List, Sequence, Tuple

import timm
from torch import nn

from .cli import UserError, nearest

FAMILIES = ('ppma',)


def our_models() -> List[str]:
    """Names of this package's models: by family, tiny to base, test models last."""
    sizes = ('tiny', 'small', 'base')
    names = [name for family in FAMILIES for name in timm.list_models(module=family)]

    def place(name: str) -> Tuple[bool, str, int]:
        family, _, size = name.partition('_')
        return family == 'test', family, sizes.index(size) if size in sizes else len(sizes)
    return sorted(names, key=place)


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
