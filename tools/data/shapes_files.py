"""Write the generated dataset of shapes: images, COCO annotations and label maps."""
import json
from pathlib import Path
from typing import Any, Dict, Optional, Set

from ..common.cli import UserError
from ..common.paths import replaced_folder

FORMAT = 1                                      # increases if the same options generate other files
MOST_IMAGES = 100_000                           # largest number of images per part
METADATA_FILE = 'dataset.json'
LAYOUT = {
    'images/{train,val}/*.jpg': 'the images',
    'annotations/instances_{train,val}.json': 'COCO instances: box, area and RLE mask of what is seen of each shape',
    'annotations_seg/{train,val}/*.png': 'ADE20K-style label maps, one channel; 0 is background, a class like the '
                                         'others (no reduce_zero_label)',
}


def expected_files(options: Dict[str, Any]) -> Set[str]:
    """Return the files of a dataset with these options, relative to its folder, with slashes."""
    files = {METADATA_FILE}
    for part in ('train', 'val'):
        files.add(f'annotations/instances_{part}.json')
        for index in range(options[part]):
            files |= {f'images/{part}/{index:06d}.jpg', f'annotations_seg/{part}/{index:06d}.png'}
    return files


def read_options(folder: Path) -> Optional[Dict[str, Any]]:
    """Return the options of the dataset in a folder, or None if it holds no dataset."""
    try:
        metadata = json.loads((folder / METADATA_FILE).read_text(encoding='utf-8'))
        options = metadata['options']
        counts = options['train'], options['val']
        known = metadata['dataset'] == 'shapes' and all(type(n) is int and 0 < n <= MOST_IMAGES for n in counts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {'format': metadata.get('format'), **options} if known else None


def already_there(folder: Path, options: Dict[str, Any], force: bool) -> bool:
    """Whether the folder already holds the whole dataset with these options.

    Args:
        folder: Folder of the dataset.
        options: Options with the number of the format, as `read_options` returns them.
        force: Allow a dataset of this command to be replaced.

    Raises:
        UserError: The folder holds files that must not be replaced.
    """
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise UserError(f'{folder} is a file; give a folder')
    there = {path.relative_to(folder).as_posix() for path in folder.rglob('*') if not path.is_dir()}
    if not there and not any(folder.iterdir()):
        return False
    old = read_options(folder)
    if old is None:
        raise UserError(f'{folder} holds other files: give a new or empty folder')
    expected = expected_files(old)
    if force:
        if there - expected:
            raise UserError(f'{folder} holds files that are not part of its dataset, such as '
                            f'{min(there - expected)}: move them away, or give another folder')
        return False
    if old != options:
        other = [f'{key} {_text(old.get(key))}, not {_text(value)}' for key, value in options.items()
                 if old.get(key) != value]
        raise UserError(f"{folder} holds a dataset with other options ({'; '.join(other) or 'of another version'}): "
                        'give --force to replace it, or another folder')
    if expected - there:
        raise UserError(f'{folder} lacks files of its dataset, such as {min(expected - there)}: give --force to '
                        'generate it again')
    return True


def _text(option: Any) -> str:
    return 'x'.join(map(str, option)) if isinstance(option, list) else str(option)


def write_part(folder: Path, part: str, options: Dict[str, Any]) -> int:
    """Write the images, label maps and instances of a part ('train' or 'val'), and return the number of shapes."""
    from PIL import Image

    from .shapes import CLASSES, annotations, backgrounds, label_map, random_scene
    for kind in ('images', 'annotations_seg'):
        (folder / kind / part).mkdir(parents=True)
    (folder / 'annotations').mkdir(exist_ok=True)
    images, found, photographs = [], [], backgrounds(part)
    height, width = options['size']
    for index in range(options[part]):
        scene = random_scene(options['seed'], part, index, photographs, (height, width))
        name = f'{index:06d}'
        # Full color resolution: shapes are small.
        Image.fromarray(scene.image).save(folder / 'images' / part / f'{name}.jpg', quality=90, subsampling=0)
        Image.fromarray(label_map(scene)).save(folder / 'annotations_seg' / part / f'{name}.png')
        images.append(dict(id=index + 1, file_name=f'{name}.jpg', height=height, width=width))
        # Ids count from 1: pycocotools takes 0 for "not matched".
        found += [dict(id=len(found) + n, image_id=index + 1, **a) for n, a in enumerate(annotations(scene), 1)]
    categories = [dict(id=n, name=name, supercategory='shape') for n, name in enumerate(CLASSES, 1)]
    info = dict(description='Colored shapes on photographs, generated by subquad make-dataset', version=str(FORMAT))
    (folder / 'annotations' / f'instances_{part}.json').write_text(json.dumps(
        dict(info=info, licenses=[], images=images, annotations=found, categories=categories), separators=(',', ':')))
    return len(found)


def make_shapes(folder: Path, options: Dict[str, Any]) -> Dict[str, int]:
    """Write a dataset of shapes atomically, to an empty folder or over an older dataset.

    Args:
        folder: Folder that `already_there` has checked.
        options: train and val (numbers of images), size ([H, W]) and seed.

    Returns:
        Number of shapes in each part.

    Raises:
        UserError: A photograph is missing, or the folder cannot be written to.
    """
    from .shapes import CLASSES, photograph_metadata
    try:
        labels = {name: n for n, name in enumerate(('background', *CLASSES))}
        metadata = dict(dataset='shapes', format=FORMAT, options=options, layout=LAYOUT, labels=labels,
                        photographs=photograph_metadata())
        with replaced_folder(folder) as new:
            counts = {part: write_part(new, part, options) for part in ('train', 'val')}
            text = json.dumps(metadata, indent=2, ensure_ascii=False) + '\n'
            (new / METADATA_FILE).write_text(text, encoding='utf-8')
    except FileNotFoundError as error:
        if error.errno is not None:
            raise UserError(f'cannot write to {folder} ({error.strerror})') from error
        raise UserError(f'{error}: pip install scikit-learn scikit-image') from error
    except OSError as error:
        raise UserError(f'cannot write to {folder} ({error.strerror or error})') from error
    return counts
