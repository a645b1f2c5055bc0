"""Classify image files, or all images of a folder, with a checkpoint: the likeliest classes as a table or JSON. With a
detection or segmentation config before the checkpoint: drawn pictures, and boxes and masks as JSON."""
import argparse
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .cli import UserError

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.bmp', '.gif', '.webp', '.tif', '.tiff', '.ppm')


def load_classifier(checkpoint: str, name: Optional[str] = None) -> Tuple[Any, Any, List[str]]:
    """(model in eval mode, transform of PIL images, class names) from a checkpoint.

    Args:
        checkpoint: a file of `subquad train`, which knows its model, or another together with `name`.
        name: timm name of the model, where the file does not know it.

    Raises:
        UserError: the file cannot be read, does not fit the model, or no model is known.
    """
    import timm.data

    from ..backbones.weights import WeightsError, load_state_dict, read_checkpoint
    from .zoo import create
    try:
        weights, facts, _ = read_checkpoint(checkpoint)
        if not isinstance(facts, dict) or not isinstance(facts.get('model', ''), str):
            raise UserError(f'{checkpoint} holds metadata of another program: give --model NAME')
        if not name and 'model' not in facts:
            raise UserError(f'{checkpoint} does not say which model it is of: give --model NAME (subquad models lists '
                            'them)')
        same = name in (None, facts.get('model'))
        options = facts.get('options', {}) if same else {}
        if not facts:
            options['num_classes'] = next((w.shape[0] for k, w in weights.items()
                                           if k in ('head.weight', 'head.fc.weight')), 1000)
        model = create(name or facts['model'], **options).eval()
        load_state_dict(model, weights, str(checkpoint))
    except WeightsError as error:
        raise UserError(str(error)) from error
    transform = facts.get('transform') if same else None
    classes = facts.get('classes') or [str(n) for n in range(model.num_classes)]
    if len(classes) != model.num_classes:
        raise UserError(f'{checkpoint} names {len(classes)} classes for a model of {model.num_classes}')
    try:
        transform = timm.data.create_transform(**(transform or timm.data.resolve_model_data_config(model)))
    except TypeError as error:
        raise UserError(f'{checkpoint}: transform: {error}') from error
    return model, transform, classes


def image_files(paths: Sequence[str]) -> List[Path]:
    """The files, and for a folder the images in it and below it, sorted.

    Raises:
        UserError: a path that does not exist, or a folder without images.
    """
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.rglob('*') if p.suffix.lower() in EXTENSIONS and p.is_file())
            if not found:
                raise UserError(f'no images in the folder {path} (endings: {" ".join(EXTENSIONS)})')
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f'no file or folder {path}')
    return files


def load_images(files: Sequence[Path], transform) -> List[Any]:
    """The files as tensors.

    Raises:
        UserError: a file that is no image.
    """
    from PIL import Image, UnidentifiedImageError
    images = []
    for file in files:
        try:
            with Image.open(file) as image:
                images.append(transform(image.convert('RGB')))
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise UserError(f'{file} is not an image that can be read') from error
    return images


def classify(model, transform, classes: List[str], files: Sequence[Path], topk: int = 5,
             batch_size: int = 16) -> List[Dict[str, Any]]:
    """For each file dict(file, classes=[dict(name, probability), ...]), the likeliest first.

    Raises:
        UserError: a file that is no image.
    """
    import torch
    results = []
    for start in range(0, len(files), batch_size):
        part = files[start:start + batch_size]
        with torch.inference_mode():
            values, indices = model(torch.stack(load_images(part, transform))).softmax(-1).topk(min(topk, len(classes)))
        for file, value, index in zip(part, values.tolist(), indices.tolist()):
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
    parser.add_argument('--topk', type=int, default=3, help='classes to show (default: 3)')
    parser.add_argument('--out', metavar='FOLDER', help='for pictures and predictions.json of detectors and segmenters '
                        '(default: predictions)')
    parser.add_argument('--score', type=float, default=0.3, help='objects that score less are left out (default: 0.3)')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    if args.topk < 1:
        raise UserError(f'--topk must be at least 1, got {args.topk}')
    if not 0 <= args.score <= 1:
        raise UserError(f'--score must be from 0 to 1, got {args.score}')
    # Weights have an ending; a misspelt name of a config has none.
    if args.checkpoint.endswith('.py') or not Path(args.checkpoint).suffix and not Path(args.checkpoint).exists():
        results, show_results = _predict_dense(args), _show_dense
    else:
        if args.out:
            raise UserError('--out is for detectors and segmenters: subquad predict CONFIG CHECKPOINT IMAGES --out '
                            'FOLDER')
        files = image_files(args.images)
        results = classify(*load_classifier(args.checkpoint, args.model), files, args.topk)
        show_results = show
    if args.json:
        print(json.dumps(results, indent=2))
        return 0
    show_results(results)
    return 0


def _predict_dense(args: argparse.Namespace) -> List[Dict[str, Any]]:
    """Detect or segment, write the pictures and predictions.json, return what it holds."""
    from .config import load, writable_folder
    from .train import is_classifier
    if args.model:
        raise UserError('--model is for classifiers; a detection or segmentation config names its own')
    config = load(args.checkpoint)
    if is_classifier(config):
        raise UserError(f'{args.checkpoint} is a classification config: subquad predict CHECKPOINT IMAGES')
    checkpoint, *images = args.images
    if not images:
        raise UserError(f'subquad predict {args.checkpoint} CHECKPOINT IMAGES: no images given')
    files = image_files(images)
    out = writable_folder(args.out or 'predictions')
    from .dense.predict import predict
    results = predict(config, checkpoint, files, out, args.score)
    (out / 'predictions.json').write_text(json.dumps(results, indent=2))
    return results


def _show_dense(results: List[Dict[str, Any]]) -> None:
    """Print what was found as a table."""
    from rich.console import Console
    from rich.table import Table
    table = Table('image', 'found', 'picture')
    for row in results:
        if 'classes' in row:
            largest = sorted(row['classes'], key=lambda c: -c['share'])
            found = ', '.join(f"{c['name']} {c['share']:.1%}" for c in largest)
        else:
            names = [item['class'] for item in row['objects']]
            found = ', '.join(f'{names.count(name)} {name}' for name in dict.fromkeys(names)) or 'nothing'
        table.add_row(row['file'], found, row['picture'])
    Console().print(table)


def show(results: List[Dict[str, Any]]) -> None:
    """Print the results of `classify` as a table."""
    from rich.console import Console
    from rich.table import Table
    table = Table('image', 'class', 'next likeliest')
    for row in results:
        texts = [f"{c['name']} ({c['probability']:.1%})" for c in row['classes']]
        table.add_row(row['file'], texts[0], ', '.join(texts[1:]))
    Console().print(table)


if __name__ == '__main__':
    from .cli import run
    run(main)
