"""Images from which int8 quantization takes the ranges of the values."""
from typing import List, Sequence

from torch import Tensor

from ..common.cli import UserError
from ..common.images import LeftOut, UnreadableImage, image_files
from ..common.output import progress
from .subject import Subject

DEFAULT_IMAGES = 100


def calibration_images(subject: Subject, folders: Sequence[str], count: int = DEFAULT_IMAGES) -> List[Tensor]:
    """Read and preprocess images of folders, spread evenly over their sorted names.

    Args:
        subject: The model to export.
        folders: Image files or folders.
        count: Largest number of images.

    Returns:
        Images (1, C, H, W), float32. Files that cannot be read are reported on stderr and left out.

    Raises:
        UserError: A folder does not exist or holds no images, or none can be read.
    """
    if subject.prepare is None:
        raise UserError(f'{subject.name} does not say how to preprocess images, so it cannot be calibrated')
    files = image_files(folders)
    files = [files[n * len(files) // min(count, len(files))] for n in range(min(count, len(files)))]
    left_out, images = LeftOut(len(files)), []
    for file in progress(files, 'images'):
        try:
            images.append(subject.prepare(file).float().contiguous())
        except UnreadableImage as error:
            left_out(error)
    left_out.code()
    return images
