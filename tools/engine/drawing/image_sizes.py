"""Read photographs at their own size, or as the model's transform prepares them."""
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

from PIL import Image
from torchvision.transforms import Compose

from ....backbones.options import MIN_SIZE
from ...common.cli import shown
from ...common.images import LeftOut, UnreadableImage, note_once, open_image

# An image that --max-side does not reduce to fewer pixels is left out.
_MOST_PIXELS = 640 * 640


def load_photographs(files: Sequence[Path], transform: Any, left_out: LeftOut, own_size: Optional[bool],
                     max_side: int) -> List[Tuple[Path, Any]]:
    """Return (file, tensor (3, H, W)) of each image; `left_out` receives the errors of files that cannot be read.

    Images are taken at their own size if `own_size` is True, at the size of the model's transform if it is False, and
    if it is None at their own size if they are at least as large as the transform's. At their own size, the longest
    side is reduced to `max_side`, with a note on stderr, but the shortest side stays at 32 pixels or more.
    """
    # The transform without resizing and cropping.
    own = Compose([step for step in getattr(transform, 'transforms', ())
                   if type(step).__name__ in ('MaybeToTensor', 'ToTensor', 'Normalize')])

    def read(file: Path) -> Any:
        image = open_image(file)
        prepared = transform(image)
        if own_size or own_size is None and all(
                side >= least for side, least in zip(image.size, (prepared.shape[2], prepared.shape[1]))):
            prepared = own(_reduced(image, file, max_side))
        return prepared

    return list(left_out.read(files, read))


def _reduced(image: Any, file: Path, max_side: int) -> Any:
    """Return the image, reduced to a longest side `max_side` as far as its shortest side does not fall below 32."""
    wanted, allowed = max_side / max(image.size), MIN_SIZE / min(image.size)
    scale, most = min(1, max(wanted, allowed)), max(_MOST_PIXELS, max_side ** 2)
    size = tuple(round(side * scale) for side in image.size)
    if size[0] * size[1] > most:
        raise UnreadableImage(f'{shown(file)}, {image.height} x {image.width} pixels, is too long: no side is reduced '
                              f'below {MIN_SIZE}, and {size[1]} x {size[0]} is more than {most:,} pixels')
    if size == image.size:
        return image
    kept = f', because no side is reduced below {MIN_SIZE}' if allowed > wanted else ''
    note_once(str(file), f'{file.name} is reduced from {image.height} x {image.width} to {size[1]} x {size[0]} pixels '
                         f'(--max-side {max_side}{kept})')
    return image.resize(size, Image.Resampling.LANCZOS)
