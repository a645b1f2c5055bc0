"""Read photographs at their own size, or as the model's transform prepares them."""
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

from ...common.images import LeftOut, UnreadableImage, note_once, open_image


def load_photographs(files: Sequence[Path], transform: Any, left_out: LeftOut, own_size: Optional[bool],
                     max_side: int) -> List[Tuple[Path, Any]]:
    """Return (file, tensor (3, H, W)) of each image.

    Args:
        files: Image files.
        transform: The model's transform of PIL images.
        left_out: Receives the errors of files that cannot be read.
        own_size: Take images at their own size; False for the transform's size, None for the own size of images that
            are at least as large as the transform's.
        max_side: Longest side of images at their own size; larger ones are reduced, with a note on stderr.

    Raises:
        UnreadableImage: `left_out` raises it.
    """
    found = []
    for file in files:
        try:
            image = open_image(file)
        except UnreadableImage as error:
            left_out(error)
            continue
        prepared = transform(image)
        if own_size or own_size is None and all(
                side >= least for side, least in zip(image.size, (prepared.shape[2], prepared.shape[1]))):
            prepared = _at_own_size(transform)(_reduced(image, file, max_side))
        found.append((file, prepared))
    return found


def _reduced(image: Any, file: Path, max_side: int) -> Any:
    from PIL import Image
    if max(image.size) <= max_side:
        return image
    size = tuple(max(1, round(side * max_side / max(image.size))) for side in image.size)
    note_once(str(file), f'{file.name} is reduced from {image.height} x {image.width} to {size[1]} x {size[0]} pixels '
                         '(--max-side)')
    return image.resize(size, Image.Resampling.LANCZOS)


def _at_own_size(transform: Any) -> Any:
    """Return the transform without resizing and cropping."""
    from torchvision.transforms import Compose
    return Compose([step for step in transform.transforms
                    if type(step).__name__ in ('MaybeToTensor', 'ToTensor', 'Normalize')])
