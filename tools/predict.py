"""Classify image files, or all images of a folder, with a checkpoint: the likeliest classes as a table or JSON. With a
detection or segmentation config before the checkpoint: drawn pictures, and boxes and masks as JSON."""
import argparse
import itertools
import math
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from .common.cli import UserError, one_line, shown
from .common.images import LeftOut, UnreadableImage, open_image
from .common.output import add_row, dumps, print_table, progress
from .engine.classification.weight_files import load_classifier

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.bmp', '.gif', '.webp', '.tif', '.tiff', '.ppm')


def image_files(paths: Sequence[str]) -> List[Path]:
    """The files, and for a folder the images in it and below it, sorted.

    Raises:
        UserError: a path that does not exist or cannot be one, or a folder without images.
    """
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
        except OSError as error:                     # a name that is too long, for one
            raise UserError(f'{shown(path)}: {error.strerror or error}') from error
    return files


def load_images(files: Iterable[Path], transform, left_out: LeftOut) -> Iterator[Tuple[Path, Any]]:
    """(file, tensor) of each file; those that cannot be read are left to `left_out`.

    Raises:
        UnreadableImage: by `left_out`.
    """
    for file in files:
        try:
            yield file, transform(open_image(file))
        except UnreadableImage as error:
            left_out(error)


def classify(model, transform, classes: List[str], files: Sequence[Path], topk: int = 5,
             batch_size: int = 16, left_out: Optional[LeftOut] = None) -> List[Dict[str, Any]]:
    """For each file dict(file, classes=[dict(name, probability), ...]), the likeliest first. Files that cannot be read
    are left to `left_out`; without it they are errors.

    Raises:
        UnreadableImage: see above.
    """
    import torch
    results = []
    left_out = left_out or LeftOut(len(files), strict=True)
    images = load_images(progress(files, 'images'), transform, left_out)
    while part := list(itertools.islice(images, batch_size)):
        batch = torch.stack([image for _, image in part])
        try:
            with torch.inference_mode():
                values, indices = model(batch).softmax(-1).topk(min(topk, len(classes)))
        except (ValueError, RuntimeError, AssertionError) as error:       # a size that the model does not take
            size = ' x '.join(map(str, batch.shape[2:]))
            raise UserError(f'the model does not take images of {size}: {one_line(error)}') from error
        for (file, _), value, index in zip(part, values.tolist(), indices.tolist()):
            results.append(dict(file=str(file), classes=[dict(name=classes[i], probability=v)
                                                         for v, i in zip(value, index)]))
    return results


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm and torchvision)
    parser = argparse.ArgumentParser('subquad predict', description=__doc__)
    parser.add_argument('checkpoint', metavar='[CONFIG] CHECKPOINT', help='weights of subquad train (.safetensors), or '
                        'other weights with --model; or a detection or segmentation config and its weights')
    parser.add_argument('images', nargs='+', help='image files or folders')
    parser.add_argument('--model', metavar='NAME', help='timm name, for a checkpoint that does not know its model')
    parser.add_argument('--topk', type=int, help='classes to show (default: 3)')
    parser.add_argument('--out', metavar='FOLDER', help='for pictures and predictions.json of detectors and segmenters '
                        '(default: predictions)')
    parser.add_argument('--score', type=float, help='objects that score less are left out (default: 0.3)')
    parser.add_argument('--strict', action='store_true', help='stop at an image that cannot be read (default: it is '
                        'named on stderr and left out, and the exit code is 1)')
    parser.add_argument('--allow-nonfinite', action='store_true', help='take weights that hold NaN or infinities')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    if args.topk is not None and args.topk < 1:
        raise UserError(f'--topk must be at least 1, got {args.topk}')
    if args.score is not None and not 0 <= args.score <= 1:
        raise UserError(f'--score must be from 0 to 1, got {args.score}')
    if _names_config(args.checkpoint):
        (results, code), show_results = _predict_dense(args), _show_dense
    else:
        for name in ('out', 'score'):
            if getattr(args, name) is not None:
                raise UserError(f'--{name} is for detectors and segmenters: subquad predict CONFIG CHECKPOINT IMAGES '
                                f'--{name} {name.upper()}')
        files = image_files(args.images)
        left_out = LeftOut(len(files), args.strict)
        loaded = load_classifier(args.checkpoint, args.model, args.allow_nonfinite)
        results = classify(*loaded, files, args.topk or 3, left_out=left_out)
        code, show_results = left_out.code(), show
    if args.json:
        print(dumps(results, indent=2))
    else:
        show_results(results)
    return code


def _names_config(name: str) -> bool:
    """Whether the first argument is a config: weights have an ending; a misspelt name of a config has none."""
    try:
        exists = Path(name).exists()
        return name.endswith('.py') or not Path(name).suffix and not exists
    except OSError as error:
        raise UserError(f'{shown(name)}: {error.strerror or error}') from error


def _predict_dense(args: argparse.Namespace) -> Tuple[List[Dict[str, Any]], int]:
    """Detect or segment, write the pictures and predictions.json; what that holds, and the exit code."""
    from .common.paths import writable_folder
    from .engine.config import load
    from .train import is_classifier
    if args.model:
        raise UserError('--model is for classifiers; a detection or segmentation config names its own')
    if args.topk is not None:
        raise UserError('--topk is for classifiers; --score chooses which objects are shown')
    config = load(args.checkpoint)
    if is_classifier(config):
        raise UserError(f'{args.checkpoint} is a classification config: subquad predict CHECKPOINT IMAGES')
    checkpoint, *images = args.images
    if not images:
        raise UserError(f'subquad predict {args.checkpoint} CHECKPOINT IMAGES: no images given')
    files = image_files(images)
    out = writable_folder(args.out or 'predictions')
    from .engine.dense.prediction import predict
    left_out = LeftOut(len(files), args.strict)
    results = predict(config, checkpoint, files, out, 0.3 if args.score is None else args.score, left_out,
                      args.allow_nonfinite)
    (out / 'predictions.json').write_text(dumps(results, indent=2))
    return results, left_out.code()


def _show_dense(results: List[Dict[str, Any]]) -> None:
    """Print what was found as a table."""
    from rich.table import Table
    table = Table('image', 'found', 'picture')
    for row in results:
        if 'classes' in row:
            largest = sorted(row['classes'], key=lambda c: -c['share'])
            found = ', '.join(f"{c['name']} {c['share']:.1%}" for c in largest)
        else:
            names = [item['class'] for item in row['objects']]
            found = ', '.join(f'{names.count(name)} {name}' for name in dict.fromkeys(names)) or 'nothing'
        add_row(table, row['file'], found, row['picture'])
    print_table(table)


def show(results: List[Dict[str, Any]]) -> None:
    """Print the results of `classify` as a table."""
    from rich.table import Table
    table = Table('image', 'class', 'next likeliest')
    for row in results:
        if any(math.isnan(c['probability']) for c in row['classes']):
            add_row(table, row['file'], 'none: the scores are NaN', '')
            continue
        texts = [f"{c['name']} ({c['probability']:.1%})" for c in row['classes']]
        add_row(table, row['file'], texts[0], ', '.join(texts[1:]))
    print_table(table)


if __name__ == '__main__':
    from .common.cli import run
    run(main)
