"""Read image files as upright 8-bit RGB images, in the same way for training, testing and prediction."""
import contextlib
import hashlib
import mmap
import os
import struct
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Sequence, Tuple, Union

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .cli import UserError, one_line, shown

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.bmp', '.gif', '.webp', '.tif', '.tiff', '.ppm')
_TIFF_SAMPLE_FORMAT, _UNSIGNED = 339, 1
# Ranges from black to white that files use; the first that contains all values applies, else the image's own range.
_RANGES = {'I': ((0, 255), (0, 65535)), 'F': ((0, 1), (0, 255))}


class UnreadableImage(UserError):
    """A file is not an image, is damaged, or is too large."""


class LeftOut:
    """Report files that cannot be read on stderr, and count them.

    Args:
        total: Number of all files.
        strict: Raise the error instead. It is also raised if there is only one file.
    """

    def __init__(self, total: int, strict: bool = False):
        self.total, self.strict, self.count = total, strict, 0

    def __call__(self, error: UnreadableImage) -> None:
        if self.strict or self.total == 1:
            raise error
        self.count += 1
        print(f'left out: {error}', file=sys.stderr, flush=True)

    def read(self, files: Iterable[Path], function: Callable[[Path], Any]) -> Iterator[Tuple[Path, Any]]:
        """Yield (file, function(file)) of the files that can be read."""
        for file in files:
            try:
                yield file, function(file)
            except UnreadableImage as error:
                self(error)

    def code(self) -> int:
        """Return the exit code: 0, or 1 if files were left out; their count is printed."""
        if self.count and self.count == self.total:
            raise UnreadableImage(f'no image could be read ({self.total} tried, see above)')
        if self.count:
            print(f'{self.count} of {self.total} images could not be read and are left out', file=sys.stderr)
        return int(self.count > 0)


class _Reported:
    """A set of names that this process shares with worker processes that are forked later.

    Each epoch has new workers, which would otherwise report the same file again.
    """

    SLOTS, BYTES = 4096, 8

    def __init__(self) -> None:
        self.table = mmap.mmap(-1, self.SLOTS * self.BYTES)

    def add(self, name: str) -> bool:
        """Add a name, and return whether it is new; always True if the set is full."""
        key = hashlib.blake2b(os.fsencode(name), digest_size=self.BYTES).digest()
        start = struct.unpack('<Q', key)[0]
        for step in range(self.SLOTS):
            place = (start + step) % self.SLOTS * self.BYTES
            found = self.table[place:place + self.BYTES]
            if found == key:
                return False
            if not any(found):
                self.table[place:place + self.BYTES] = key
                return True
        return True

    def __len__(self) -> int:
        return sum(any(self.table[place:place + self.BYTES])
                   for place in range(0, self.SLOTS * self.BYTES, self.BYTES))


_reported, _noted = _Reported(), _Reported()


def report_once(file: Union[str, Path], sentence: str) -> None:
    """Print a sentence about a file on stderr, once per file in a run and all of its workers."""
    if _reported.add(str(file)):
        print(sentence, file=sys.stderr, flush=True)


def note_once(subject: str, sentence: str) -> None:
    """Print a note on stderr, once per subject in a run and all of its workers."""
    if _noted.add(subject):
        print(f'note: {sentence}', file=sys.stderr, flush=True)


def reported() -> int:
    """Return the number of files that `report_once` has reported."""
    return len(_reported)


def image_files(paths: Sequence[str]) -> List[Path]:
    """Return the files, and for each folder all images in it and its subfolders, sorted."""
    files = []
    if '' in paths:
        raise UserError('an image or folder has an empty name')
    for path in map(Path, paths):
        try:
            if path.is_dir():
                found = sorted(p for p in path.rglob('*') if p.suffix.lower() in EXTENSIONS and p.is_file())
                if not found:
                    raise UserError(f'no images in the folder {shown(path)} (endings: {" ".join(EXTENSIONS)})')
                files += found
            elif path.is_file():
                files.append(path)
            else:
                raise UserError(f'no file or folder {shown(path)}')
        except OSError as error:                     # the name can be too long
            raise UserError(f'{shown(path)}: {error.strerror or error}') from error
    return files


def open_image(file: Union[str, Path], upright: bool = True) -> Image.Image:
    """Read an image file as RGB, 8 bits a channel.

    Images of 16 bits are scaled to 8. Files of 32-bit integers or floating-point numbers do not define white: the first
    of 255 and 65,535 (integers) or of 1 and 255 (others) that no value exceeds is taken, else the image's own range is
    stretched. A note on stderr reports each case once. Transparent pixels become white.

    Args:
        file: The image file; the first frame is read if there are several.
        upright: Rotate and flip as the EXIF orientation says.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns from half of its limit on.
            warnings.simplefilter('ignore', Image.DecompressionBombWarning)
            warnings.filterwarnings('ignore', 'Corrupt EXIF data')
            with Image.open(file) as image:
                image.load()
                with contextlib.suppress(Exception):         # damaged EXIF data make no image unreadable
                    if upright:
                        ImageOps.exif_transpose(image, in_place=True)
                return _rgb(image, file)
    except Exception as error:                   # decoders raise many kinds, such as struct.error
        raise unreadable(file, error) from error


def check_header(file: Union[str, Path]) -> None:
    """Raise UnreadableImage if the first bytes of a file are not an image's; the file may still be truncated."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', Image.DecompressionBombWarning)
            with Image.open(file):
                pass
    except Exception as error:
        raise unreadable(file, error) from error


def unreadable(file: Union[str, Path], error: Exception) -> UnreadableImage:
    """Return the error that names a file and says why it cannot be read."""
    if isinstance(error, UnreadableImage):
        return error
    if isinstance(error, Image.DecompressionBombError):
        return UnreadableImage(f'{shown(file)} exceeds the limit of {2 * Image.MAX_IMAGE_PIXELS:,} pixels; '
                               'resize it')
    why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
    reason = '' if isinstance(error, UnidentifiedImageError) else f' ({shown(why)})'
    return UnreadableImage(f'{shown(file)} is not an image that can be read{reason}')


def say_count(before: int) -> None:
    """Print how many files `report_once` has reported since it had reported `before`."""
    count = reported() - before
    if count:
        print(f"{count} image{'s' if count > 1 else ''} could not be read; see above", file=sys.stderr, flush=True)


def _rgb(image: Image.Image, file: Union[str, Path]) -> Image.Image:
    """A loaded image in RGB."""
    if image.mode[0] in 'IF':                    # I, I;16, I;16B, F: Pillow would clip their numbers at 255
        return Image.fromarray(_gray(image, file)).convert('RGB')
    if image.mode in ('RGBA', 'RGBa', 'LA', 'La', 'PA') or 'transparency' in image.info:
        image = image.convert('LA') if image.mode == 'La' else image
        page = Image.new('RGBA', image.size, 'white')
        page.alpha_composite(image.convert('RGBA'))
        image = page
    return image.convert('RGB')


def _gray(image: Image.Image, file: Union[str, Path]) -> np.ndarray:
    """A single-channel image of 16 or 32 bits as uint8 (H, W)."""
    values = np.asarray(image)
    if image.mode.startswith('I;16') or image.mode == 'I' and image.format == 'PNG':
        return _scaled(values, 0, 65535)
    sample_format = getattr(image, 'tag_v2', {}).get(_TIFF_SAMPLE_FORMAT)
    if image.mode == 'I' and sample_format in (_UNSIGNED, (_UNSIGNED,)):
        values = values.view(np.uint32)
    finite = np.isfinite(values)
    if not finite.any():
        raise UnreadableImage(f'{shown(file)} holds no number but NaN and infinities')
    least, most = (float(f(values[finite])) for f in (np.min, np.max))
    low, high = next(((low, high) for low, high in _RANGES[image.mode] if low <= least and most <= high),
                     (least, most))
    own = (low, high) == (least, most) and (low, high) not in _RANGES[image.mode]
    case = 'its own range is stretched' if own else f'{low:g} is taken for black and {high:g} for white'
    kind = 'integers of 32 bits' if image.mode == 'I' else 'floating-point numbers'
    note_once(f"{image.mode} {'own' if own else case}",
              f'{shown(file)} holds {kind} from {least:g} to {most:g}; {case}, here and for others like it')
    return _scaled(np.nan_to_num(values, nan=low, posinf=high, neginf=low) if not finite.all() else values, low, high)


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Numbers from low to high as uint8, rounded."""
    return np.rint((values.astype(np.float64) - low) * (255 / max(high - low, 1e-300))).astype(np.uint8)
