"""Load images in the pipelines of MMDetection and MMSegmentation in the same way as for classifiers."""
from copy import deepcopy
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

import numpy as np
from mmcv.transforms import LoadImageFromFile
from mmengine.registry import TRANSFORMS
from PIL import Image

from ...common.cli import shown
from ...common.images import UnreadableImage, note_once, open_image, report_once

_COLORS = ('color', 'color_ignore_orientation')


@TRANSFORMS.register_module()
class LoadPhotograph(LoadImageFromFile):
    """Read an image as BGR with `subquad.tools.common.images.open_image`.

    OpenCV, which mmcv's own transform uses, returns a half-gray image for a truncated JPEG, does not rotate WebP, and
    cannot read images of 32 bits.

    Args:
        unreadable: Result for an image that cannot be read, which is reported on stderr. 'replace' returns None, and
            the data set takes a random other image; 'blank' returns a black image of the annotated size; 'raise' raises
            an error.
        kwargs: Arguments of LoadImageFromFile. color_type 'color_ignore_orientation' ignores the EXIF orientation.

    Raises:
        UnreadableImage: The image cannot be read, and `unreadable` is 'raise', or it is 'blank' and no annotation gives
            the size. Also if the file does not exist.
    """

    def __init__(self, unreadable: str = 'raise', **kwargs: Any):
        super().__init__(**kwargs)
        self.unreadable = unreadable

    def transform(self, results: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        try:
            image = np.asarray(open_image(results['img_path'], upright=self.color_type == 'color'))
        except UnreadableImage as error:
            # A missing file means a wrong folder, not damage.
            if self.unreadable == 'raise' or isinstance(error.__cause__, FileNotFoundError):
                raise
            if self.unreadable == 'replace':
                report_once(results['img_path'], f'{error}; another image is used instead')
                return None
            size = _annotated_size(results)
            if size is None:
                raise
            report_once(results['img_path'], f'{error}: it counts as a black image, on which nothing is found')
            image = np.zeros((*size, 3), np.uint8)
        annotated = results.get('height'), results.get('width')
        if image.shape[:2] != annotated == image.shape[1::-1]:
            note_once('annotated unrotated', f"{shown(results['img_path'])} is {annotated[1]} x {annotated[0]} in its "
                      'annotations, but not in its EXIF orientation: if they are of the image as it is stored, set '
                      "color_type='color_ignore_orientation' in LoadImageFromFile")
        image = np.ascontiguousarray(image[..., ::-1])
        results['img'] = image.astype(np.float32) if self.to_float32 else image
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        return results


def _annotated_size(results: Dict[str, Any]) -> Optional[Tuple[int, int]]:
    """Return (height, width) as COCO's annotations or the label map give it, or None."""
    if results.get('height') and results.get('width'):
        return int(results['height']), int(results['width'])
    if not results.get('seg_map_path'):
        return None
    try:
        with Image.open(results['seg_map_path']) as labels:
            return labels.height, labels.width
    except OSError:
        return None


def with_photographs(config: Any, unreadable: str) -> Any:
    """Return a copy of a config, or of a part of it, in which LoadPhotograph replaces LoadImageFromFile.

    Loaders of remote files or of other color types are kept.
    """
    if not isinstance(config, (dict, list, tuple)):
        return config
    config = deepcopy(config)
    if not isinstance(config, dict):
        return type(config)(with_photographs(item, unreadable) for item in config)
    for key, value in config.items():
        config[key] = with_photographs(value, unreadable)
    kind, backend = config.get('type'), config.get('backend_args') or {}
    plain = kind is LoadImageFromFile or str(kind).rpartition('.')[2] == 'LoadImageFromFile'
    if plain and config.get('color_type', 'color') in _COLORS and not config.get('file_client_args') \
            and backend.get('backend', 'local') == 'local' and '://' not in str(backend):
        for key in ('ignore_empty', 'imdecode_backend'):
            config.pop(key, None)
        config.update(type='LoadPhotograph', unreadable=unreadable)
    return config


def pixels(file: Union[str, Path], size: Optional[Tuple[int, int]] = None) -> np.ndarray:
    """Read an image as RGB (H, W, 3): upright, or in the orientation in which a pipeline that returned `size` read it.

    With `size`, (height, width), a file that cannot be read gives a black image.
    """
    try:
        image = open_image(file)
        if size is not None and (image.height, image.width) != tuple(size):
            image = open_image(file, upright=False)
    except UnreadableImage:
        if size is None:
            raise
        return np.zeros((*size, 3), np.uint8)
    return np.array(image)
