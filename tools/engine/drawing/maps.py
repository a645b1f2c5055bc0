"""Which maps of a model can be drawn, and the functions that draw them."""
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ...common.cli import UserError, nearest
from ...common.paths import writable_folder
from . import influences, memories, pictures

TITLES = {'influences': 'influence on the token under the cross, mean over heads',
          'context_scores': 'context scores, mean over latent tokens',
          'decay_factors': 'how attention paths fade with each step, mean over heads',
          'state_decays': 'how fast the memories of the recurrence decay, and how long they last'}


def map_kind(model: Any) -> str:
    """Return the kind of maps that a model has, a key of TITLES.

    Raises:
        UserError: The model belongs to none of the families of this package.
    """
    from ....backbones import PPMA
    for what in ('influences', 'context_scores', 'state_decays'):
        if hasattr(model, what):
            return what
    if isinstance(model, PPMA):
        return 'decay_factors'
    raise UserError(f'{type(model).__name__} has no maps to draw: MobileViTv2 has context scores, Myo influences, '
                    'PPMA decay factors, LCSM state decays')


def draw_maps(out: Path, what: str, model: Any, transform: Any, images: Sequence[Tuple[Path, Any]],
              wanted: Optional[List[str]] = None, at: Tuple[float, ...] = (0.5, 0.5), heads: bool = False) -> int:
    """Draw a model's maps over images into one figure.

    Args:
        out: Output file.
        what: Kind of maps, as `map_kind` returns it.
        model: Classifier in eval mode.
        transform: Transform that prepared the images.
        images: (file, tensor) of each image.
        wanted: Names or parts of names of layers (None: all).
        at: Position of Myo's query token, as fractions of height and width.
        heads: Draw the heads of LCSM one by one.

    Returns:
        Number of drawn layers.

    Raises:
        UserError: The model does not accept the images or the position, the images differ in size, no layer has a
            wanted name, or the output file cannot be written.
    """
    import torch
    sizes = {' x '.join(map(str, image.shape[1:])): file.name for file, image in images}
    if len(sizes) > 1:
        found = ', '.join(f'{file} has {size}' for size, file in list(sizes.items())[:2])
        raise UserError(f'the images of one picture must have the same size: {found}')
    inputs = torch.stack([image for _, image in images])
    try:
        maps, draw = _maps(what, model, inputs, at, heads)
    except ValueError as error:
        raise UserError(str(error)) from error
    maps = {layer: maps[layer] for layer in _chosen(list(maps), wanted)}
    writable_folder(str(out.parent))
    name = getattr(model, 'pretrained_cfg', {}).get('architecture') or type(model).__name__
    draw(out, [file.stem for file, _ in images], pictures.unnormalized(inputs, transform), maps,
         pictures.layer_titles(list(maps)), f'{name}: {TITLES[what]}')
    return len(maps)


def _chosen(layers: Sequence[str], wanted: Optional[List[str]]) -> List[str]:
    """Return the layers whose names contain one of the wanted texts.

    Raises:
        UserError: A text matches no layer.
    """
    for text in wanted or []:
        if not any(text in layer for layer in layers):
            hint = nearest(text, list(layers)) or f"; there are {', '.join(layers)}"
            raise UserError(f'--layers {text}: no such layer{hint}')
    return [layer for layer in layers if not wanted or any(text in layer for text in wanted)]


def _maps(what: str, model: Any, inputs: Any, at: Tuple[float, ...], heads: bool
          ) -> Tuple[Dict[str, Any], Callable[..., None]]:
    """Return the maps by layer, and the function that draws them."""
    if what == 'influences':
        return model.influences(inputs, at), influences.draw
    if what == 'context_scores':
        return model.context_scores(inputs), pictures.draw_scores
    if what == 'state_decays':
        return memories.memories(model, inputs), partial(memories.draw, heads=heads)
    return pictures.decay_factors(model, inputs), pictures.draw_decays


def at_own_size(transform: Any) -> Any:
    """Return the transform without resizing and cropping."""
    from torchvision.transforms import Compose
    return Compose([step for step in transform.transforms
                    if type(step).__name__ in ('MaybeToTensor', 'ToTensor', 'Normalize')])
