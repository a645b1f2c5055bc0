"""Export a model to ONNX, ONNX Runtime Mobile, OpenVINO, PyTorch archives, ExecuTorch, LiteRT, ncnn or Core ML.

The command converts the model's export form with BatchNorm fused, runs the file on the format's runtime and compares
its outputs with the ordinary model. A file appears only if the largest relative error is within the tolerance: 1e-4 for
fp32, 1e-2 for fp16, 1 for int8. Core ML files are not run: they are converted, read again, and their operators checked.
Sizes, preprocessing and labels are in the file's metadata.
"""
import argparse
import signal
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from ..backbones.weights.registry import SCHEME, WEIGHTS
from .common.cli import UserError, parse_size, quiet
from .common.output import dumps
from .common.paths import writable_folder
from .engine.config import load
from .engine.counting.counting_configs import is_config
from .exporters.formats import DYNAMIC, FORMATS, PRECISIONS, WITH_NMS, Options, chosen_formats
from .exporters.pipeline import export, print_reports
from .exporters.subject import classifier_from, classifier_subject, with_normalization


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))      # so that temporary folders are removed
    args = _parser().parse_args(argv)
    _check(args)
    formats = chosen_formats(args.format, Options(args.precision, frozenset(args.dynamic)))
    _check_calibration(args, formats)
    find, folder = _finder(args), writable_folder(args.out)
    reports, failures = [], {}
    for name, options in formats.items():  # a format that fails does not stop the others
        try:
            print(f'exporting to {name}', file=sys.stderr, flush=True)
            subject = find(name)
            if args.calibrate and FORMATS[name].calibrates:
                options = options._replace(calibration=subject.calibration(args.calibrate, args.calibrate_images))
            parts = [Path(subject.name).stem, *(['features'] if args.features else []),
                     *([options.precision] if options.precision != 'fp32' else [])]
            reports.append(export(subject, name, folder / f"{'_'.join(parts)}{FORMATS[name].suffix}", options,
                                  args.tolerance, args.repeats))
        except UserError as error:
            if len(formats) == 1:
                raise
            failures[name] = str(error)
    if args.json:
        failed = [dict(format=name, error=text) for name, text in failures.items()]
        print(dumps([*(report.row() for report in reports), *failed], indent=2))
    else:
        print_reports(reports)
    for name, text in failures.items():
        print(f'error: {name}: {text}', file=sys.stderr)
    return int(bool(failures) or not all(report.passed for report in reports))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('subquad export', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', metavar='MODEL|CONFIG', help='timm model, published weights such as test_ppma.digits, '
                        'weight file of subquad train, or detection or segmentation config')
    parser.add_argument('--format', nargs='+', required=True, choices=[*FORMATS, 'all'], metavar='FORMAT',
                        help=f"{', '.join(FORMATS)}; or all that are installed")
    parser.add_argument('--weights', metavar='NAME_OR_FILE', help='weight file, name of published weights or their '
                        'tag (default: those that MODEL names; else random ones, which a note reports)')
    parser.add_argument('--size', help="image size, one number or HEIGHTxWIDTH (default: the model's own)")
    parser.add_argument('--dynamic', nargs='+', choices=DYNAMIC, default=[], help='dimensions that the file leaves '
                        'open: the batch, or height and width')
    parser.add_argument('--precision', choices=PRECISIONS, help='precision inside of the file (default: '
                        'fp32, and fp16 for coreml); palettes are for coreml, dynamic8 is for litert; images and '
                        'scores remain float32')
    parser.add_argument('--calibrate', nargs='+', metavar='FOLDER', help='images from which int8 takes its ranges, '
                        'except for coreml')
    parser.add_argument('--calibrate-images', type=int, default=100, metavar='N',
                        help='number of these images to use (default: %(default)s)')
    parser.add_argument('--features', action='store_true', help='export the feature maps of all stages, not the logits')
    parser.add_argument('--normalize', action='store_true', help='put the normalization into the graph, which then '
                        'takes values from 0 to 255; resizing and cropping remain outside')
    parser.add_argument('--out', default='exports', metavar='FOLDER',
                        help='folder for the files (default: %(default)s)')
    parser.add_argument('--tolerance', type=float, help='largest relative error that passes')
    parser.add_argument('--repeats', type=int, default=20, metavar='N',
                        help='runs for the latency (default: %(default)s; 0 skips it)')
    parser.add_argument('--allow-nonfinite', action='store_true', help='accept weights that hold NaN or infinities, as '
                        'long as no output does')
    parser.add_argument('--json', action='store_true', help='print JSON')
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse values that no format accepts."""
    if args.tolerance is not None and not 0 < args.tolerance < float('inf'):
        raise UserError(f'--tolerance must be above 0 and finite, got {args.tolerance:g}')
    if args.repeats < 0:
        raise UserError(f'--repeats must be at least 0, got {args.repeats}')
    if args.calibrate_images < 1:
        raise UserError(f'--calibrate-images must be at least 1, got {args.calibrate_images}')


def _check_calibration(args: argparse.Namespace, formats: Dict[str, Options]) -> None:
    """Refuse int8 without the images that a format needs, and images that no format uses."""
    users = [name for name, options in formats.items() if options.precision == 'int8' and FORMATS[name].calibrates]
    if users and not args.calibrate:
        raise UserError(f'--precision int8 of {", ".join(users)} needs images that show the ranges of the values: '
                        '--calibrate FOLDER')
    if args.calibrate and not users:
        allowed = [name for name, form in FORMATS.items() if form.calibrates and 'int8' in form.precisions]
        given = [f'{options.precision} of {name}' for name, options in formats.items()]
        raise UserError(f'--calibrate is for --precision int8 of {", ".join(allowed)}, not for {", ".join(given)}')


def _finder(args: argparse.Namespace) -> Callable[[str], Any]:
    """Return the function that builds the `Subject` for a format; detectors differ by format."""
    model, checkpoint = _named(args.model, args.weights)
    size = args.size and parse_size(args.size, smallest=32, largest=8192)
    if dense := Path(model).suffix != '.safetensors' and is_config(model):
        with quiet():                          # for what MMDetection and MMSegmentation print
            config = load(model)
            from .exporters.dense_subject import dense_subject
    else:
        read, weights = classifier_from(model, checkpoint, args.allow_nonfinite)
    if checkpoint is None and (dense or weights == 'random'):
        print(f'note: no --weights are given, so {model} is exported with random weights', file=sys.stderr)
    if not dense:
        subject = classifier_subject(read, weights, size, args.features, args.normalize)
        return lambda name: subject

    def find(name: str) -> Any:
        subject = dense_subject(config, checkpoint, size, nms=name in WITH_NMS, labels=name != 'ncnn',
                                features=args.features, allow_nonfinite=args.allow_nonfinite)
        return with_normalization(subject) if args.normalize else subject
    return find


def _named(model: str, checkpoint: Optional[str]) -> Tuple[str, Optional[str]]:
    """Replace the name of a published detector by its config, and a tag of weights for a config by their name."""
    for weights in WEIGHTS.values():
        if weights.config and checkpoint is None and model in (weights.name, SCHEME + weights.name):
            return weights.config, weights.name
        if weights.config and weights.config == model and weights.tag == checkpoint:
            return model, weights.name
    return model, checkpoint
