"""Classify image files, or all images in a folder, and print the top classes. With a detection or segmentation config
before the checkpoint, or published weights of a detector or segmenter, draw the predictions and write boxes and masks
as JSON. A file of subquad export runs on its own runtime."""
import argparse
import math
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ..backbones.prepare import prepare
from ..backbones.weights.registry import WEIGHTS, of_arch
from ..backbones.weights.resolve import published
from .common.cli import UserError, nearest, quiet, shown, weight_errors
from .common.images import LeftOut, image_files
from .common.output import dumps
from .common.paths import writable_folder
from .engine.config import known_configs
from .exporters.formats import format_of

Results = List[Dict[str, Any]]


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    parser = argparse.ArgumentParser('subquad predict', description=__doc__)
    parser.add_argument('checkpoint', metavar='[CONFIG] NAME_OR_FILE', help='weights of subquad train (.safetensors), '
                        'published weights by name, such as ppma_tiny.in1k, other weights with --model, or a file of '
                        'subquad export; or a detection or segmentation config and its weights')
    parser.add_argument('images', nargs='+', help='image files or folders')
    parser.add_argument('--model', metavar='NAME',
                        help='timm name of the model, for a checkpoint that does not contain it')
    parser.add_argument('--topk', type=int, help='number of classes to print (default: 3)')
    parser.add_argument('--out', metavar='FOLDER', help='folder for the pictures and predictions.json of a detector or '
                        'segmenter (default: predictions)')
    parser.add_argument('--score', type=float, help='minimum score of the detections to keep (default: 0.3)')
    parser.add_argument('--strict', action='store_true', help='stop at an image that cannot be read (default: report '
                        'it on stderr and exit with code 1 after the others)')
    parser.add_argument('--allow-nonfinite', action='store_true', help='accept weights that hold NaN or infinities')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    if args.topk is not None and args.topk < 1:
        raise UserError(f'--topk must be at least 1, got {args.topk}')
    if args.score is not None and not 0 <= args.score <= 1:
        raise UserError(f'--score must be from 0 to 1, got {args.score}')
    if format_of(args.checkpoint):
        args.exported = _exported(args)
        dense = args.exported.metadata['task'] != 'classification'
    else:
        args.exported, dense = None, _take_config(args)
    results, code = (_predict_dense if dense else _classify)(args)
    if args.json:
        print(dumps(results, indent=2))
    return code


def _exported(args: argparse.Namespace) -> Any:
    from .exporters.exported import ExportedModel
    for name in ('model', 'allow_nonfinite'):
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} is for weights; {args.checkpoint} is an exported file")
    return ExportedModel(args.checkpoint)


def _take_config(args: argparse.Namespace) -> bool:
    """Set `args.config` to the config before the checkpoint, or to that of published weights; '' for a classifier."""
    name, args.config = args.checkpoint, ''
    try:
        # Files and published weights have a suffix, apart from the default weights of an architecture.
        if name.endswith('.py') or not (Path(name).suffix or '://' in name or of_arch(name) or Path(name).exists()):
            if not name.endswith('.py') and name not in known_configs():
                near = nearest(name, [*known_configs(), *{weights.arch for weights in WEIGHTS.values()}])
                raise UserError(f'there is no file, config or published model {name!r}{near} (subquad configs and '
                                'subquad weights list them)')
            args.config, args.checkpoint, args.images = name, args.images[0], args.images[1:]
        else:
            with weight_errors():
                weights = published(name)
            args.config = weights.config or '' if weights else ''
    except OSError as error:
        raise UserError(f'{shown(name)}: {error.strerror or error}') from error
    return bool(args.config)


def _classify(args: argparse.Namespace) -> Tuple[Results, int]:
    """Classify the images, and print the classes unless --json is given: (results, exit code)."""
    from .engine.classification.prediction import classify, print_classes
    from .engine.classification.weight_files import classifier_from_file
    for name in ('out', 'score'):
        if getattr(args, name) is not None:
            raise UserError(f'--{name} is for detectors and segmenters: subquad predict CONFIG NAME_OR_FILE IMAGES '
                            f'--{name} {name.upper()}')
    files = image_files(args.images)
    left_out = LeftOut(len(files), args.strict)
    if args.exported:
        model, transform, classes = args.exported, args.exported.transform(), args.exported.classes()
    else:
        model, transform, classes = classifier_from_file(args.checkpoint, args.model, args.allow_nonfinite)
        model = prepare(model)
    results = classify(model, transform, classes, files, args.topk or 3, left_out=left_out)
    code = left_out.code()
    if not args.json:
        print_classes(results)
    return results, code or int(any(math.isnan(c['probability']) for row in results for c in row['classes']))


def _predict_dense(args: argparse.Namespace) -> Tuple[Results, int]:
    """Detect or segment, write pictures and predictions.json, and print a table unless --json is given:
    (results, exit code)."""
    from .engine.config import is_classifier, load
    if args.model:
        raise UserError('--model is for classifiers; a detection or segmentation config defines its model')
    if args.topk is not None:
        raise UserError('--topk is for classifiers; use --score to select objects')
    config = None if args.exported else load(args.config)
    if config and is_classifier(config):
        raise UserError(f'{args.config} is a classification config; give the weights alone: '
                        'subquad predict NAME_OR_FILE IMAGES')
    if not args.images:
        raise UserError(f'no images given: subquad predict {args.config} NAME_OR_FILE IMAGES')
    files = image_files(args.images)
    out = writable_folder(args.out or 'predictions')
    with quiet():                                  # for what MMDetection prints on import
        from .engine.dense.prediction import Predictor, predict, print_found

    def predictor() -> Predictor:
        if config:
            return Predictor(config, args.checkpoint, allow_nonfinite=args.allow_nonfinite)
        from .exporters.exported_dense import ExportedPredictor
        return ExportedPredictor(args.exported)

    left_out = LeftOut(len(files), args.strict)
    results = predict(predictor, files, out, 0.3 if args.score is None else args.score, left_out)
    (out / 'predictions.json').write_text(dumps(results, indent=2))
    code = left_out.code()
    if not args.json:
        print_found(results)
    return results, code
