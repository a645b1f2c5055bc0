"""Export a model to ONNX, ONNX Runtime Mobile, ExecuTorch, LiteRT, ncnn or Core ML.

The command converts the model's export form with BatchNorm fused, runs the file on the format's runtime and compares
its outputs with the ordinary model. A file appears only if the largest relative error is within the tolerance: 1e-4 for
fp32, 1e-2 for fp16, 1 for int8. Core ML files are not run: they are converted, read again, and their operators checked.
Sizes, preprocessing and labels are in the file's metadata.
"""
import argparse
import signal
import sys
from typing import List, Optional

from .common.cli import UserError
from .common.output import dumps
from .common.paths import writable_folder
from .common.sizes import parse_size


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm)

    from .exporters.report import print_reports, row
    from .exporters.requests import Request, chosen_formats, export_formats, finder
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))      # so that temporary folders are removed
    args = _parser().parse_args(argv)
    _check(args)
    formats = chosen_formats(args.format, args.precision, frozenset(args.dynamic))
    if args.precision == 'int8' and not args.calibrate:
        raise UserError('--precision int8 needs images that show the ranges of the values: --calibrate FOLDER')
    find = finder(Request(args.model, args.checkpoint, args.size and parse_size(args.size, smallest=32, largest=8192),
                          args.features, args.normalize, args.allow_nonfinite))
    reports, failures = export_formats(
        find, formats, writable_folder(args.out), args.precision, frozenset(args.dynamic), args.calibrate or [],
        args.calibrate_images, args.tolerance, args.repeats)
    if args.json:
        failed = [dict(format=name, error=text) for name, text in failures.items()]
        print(dumps([*map(row, reports), *failed], indent=2))
    else:
        print_reports(reports)
    for name, text in failures.items():
        print(f'error: {name}: {text}', file=sys.stderr)
    return int(bool(failures) or not all(report.passed for report in reports))


def _parser() -> argparse.ArgumentParser:
    from .exporters.calibration import DEFAULT_IMAGES
    from .exporters.formats import DYNAMIC, FORMATS, PRECISIONS
    parser = argparse.ArgumentParser('subquad export', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', metavar='MODEL|CONFIG', help='timm model, published weights such as test_ppma.digits, '
                        'weight file of subquad train, or detection or segmentation config')
    parser.add_argument('--format', nargs='+', required=True, choices=[*FORMATS, 'all'], metavar='FORMAT',
                        help=f"{', '.join(FORMATS)}; or all that are installed")
    parser.add_argument('--checkpoint', metavar='FILE_OR_TAG', help='weight file, name of published weights or their '
                        'tag (default: those that MODEL names; else random ones, which a note reports)')
    parser.add_argument('--size', help="image size, one number or HEIGHTxWIDTH (default: the model's own)")
    parser.add_argument('--dynamic', nargs='+', choices=DYNAMIC, default=[], help='dimensions that the file leaves '
                        'open: the batch, or height and width')
    parser.add_argument('--precision', choices=PRECISIONS, default='fp32', help='precision inside of the file '
                        '(default: fp32); images and scores remain float32')
    parser.add_argument('--calibrate', nargs='+', metavar='FOLDER', help='images from which int8 takes its ranges')
    parser.add_argument('--calibrate-images', type=int, default=DEFAULT_IMAGES, metavar='N',
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
    if args.calibrate and args.precision != 'int8':
        raise UserError(f'--calibrate is for --precision int8, not for {args.precision}')


if __name__ == '__main__':
    from .common.cli import run
    run(main)
