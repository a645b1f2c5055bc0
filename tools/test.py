"""Evaluate a checkpoint on a config's test data: accuracy and calibration, box and mask AP, or mIoU, as a table or
JSON."""
import argparse
import math
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from .common import images
from .common.cli import UserError, add_weight_choice, quiet
from .common.output import dumps
from .common.paths import writable_folder
from .engine.config import add_config_arguments, config_with_options, is_classifier

_VIEWS = ('flip', 'five-crop', 'ten-crop')
_CLASSIFIERS_ONLY = ('labels', 'report', 'out', 'throughput')


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    args = _parser().parse_args(argv)
    config, unreadable = config_with_options(args), images.reported()
    metrics, report = _evaluate_classifier(config, args) if is_classifier(config) else _evaluate_dense(config, args)
    images.say_count(unreadable)
    from mmengine.dist import is_main_process
    if not is_main_process():
        return 0
    if not metrics:
        from .engine.training.progress import NOTHING_FOUND
        print(NOTHING_FOUND, file=sys.stderr)
    if args.record:
        _record(config, args, metrics)
    if args.json:
        print(dumps({**metrics, **({'report': report.as_dict()} if args.report else {})}))
    for name, value in () if args.json else metrics.items():
        percent = name.startswith(('accuracy/', 'calibration/', 'multi_label/'))
        print(f'{name}  {value:.2f} %' if percent else f'{name}  {value:.3f}')
    if args.report and not args.json:
        report.show()
    if args.out:
        paths = report.write(writable_folder(args.out), metrics)
        print('written: ' + ', '.join(map(str, paths)), file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('subquad test', description=__doc__)
    add_config_arguments(parser, 'report it on stderr; a classifier leaves it out; a detector or segmenter '
                         'gets a black image')
    parser.add_argument('checkpoint', metavar='NAME_OR_FILE', help='name of published weights such as '
                        'ppma_tiny.in1k, or a .safetensors file of subquad train, or a .pth file')
    add_weight_choice(parser)
    parser.add_argument('--show-dir', metavar='FOLDER', help='write pictures of the predictions, beside the '
                        'annotations if the config loads them (detectors and segmenters)')
    parser.add_argument('--tta', nargs='?', const='config', choices=('config', *_VIEWS),
                        help='average the probabilities of several views of each image (classifiers); without a '
                        'word, as the config\'s tta_model and tta_pipeline define (detectors and segmenters)')
    parser.add_argument('--labels', metavar='SET', help='test on images of ImageNet\'s classes in folders named by '
                        'WordNet ids (--data FOLDER): imagenet, imagenet-v2, imagenet-a, imagenet-r, imagenet-sketch, '
                        'real or real=FILE')
    parser.add_argument('--report', action='store_true', help='show precision and recall of the classes, the lowest '
                        'recall first, and the most frequent confusions (classifiers)')
    parser.add_argument('--out', metavar='FOLDER', help='write the report with all classes as JSON and CSV, and '
                        'pictures of the confusions and the calibration (classifiers)')
    parser.add_argument('--throughput', action='store_true', help='measure the images per second of the model and of '
                        'the data loader, each by itself (classifiers)')
    parser.add_argument('--allow-nonfinite', action='store_true', help='accept weights that hold NaN or infinities')
    parser.add_argument('--json', action='store_true', help='print JSON, with null for metrics that are not finite')
    parser.add_argument('--record', metavar='FILE', help='append the result to FILE as a line of JSON')
    return parser


def _evaluate_dense(config, args: argparse.Namespace) -> Any:
    if args.choice:
        raise UserError('--ema and --raw are for classifiers')
    for name in _CLASSIFIERS_ONLY:
        if getattr(args, name):
            raise UserError(f'--{name} is for classifiers')
    if args.tta in _VIEWS:
        raise UserError(f'--tta {args.tta} is for classifiers; --tta alone tests as the config defines')
    with quiet():                                             # for what MMDetection prints on import
        from .engine.dense.evaluation import evaluate
    return evaluate(config, args.checkpoint, args.show_dir, bool(args.tta), args.allow_nonfinite), None


def _evaluate_classifier(config, args: argparse.Namespace) -> Any:
    if args.show_dir or args.tta == 'config':
        raise UserError('--show-dir and --tta without a word are for detectors and segmenters; classifiers have --out '
                        f"FOLDER, --tta {', --tta '.join(_VIEWS)} and subquad visualize")
    from .engine.classification.class_report import ClassReport
    from .engine.classification.evaluation import evaluate
    from .engine.classification.label_spaces import use_labels
    if args.labels:
        use_labels(config, args.labels, args.data)
    if args.out:
        writable_folder(args.out)                             # an error now, not after minutes
    report = ClassReport() if args.report or args.out else None
    return evaluate(config, args.checkpoint, bool(args.record), args.allow_nonfinite, choice=args.choice, tta=args.tta,
                    throughput=args.throughput, report=report, given=tuple(args.cfg_options or ())), report


def _record(config, args: argparse.Namespace, metrics: Dict[str, float]) -> None:
    """Append the config, the options, the metrics and the machine to a file of JSON lines."""
    from .engine.records import append, environment
    options = ' '.join([f'{key}={value}' for key, value in (args.cfg_options or {}).items()]
                       + ['--tta'] * (args.tta == 'config') + [f'--{name} {getattr(args, name)}' for name in (
                           'tta', 'labels') if getattr(args, name) not in (None, 'config')]
                       + ([{'averaged': '--ema', 'raw': '--raw'}[args.choice]] if args.choice else []))
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    append(Path(args.record).expanduser(), {'config': Path(args.config).stem, 'options': options,
                                   'model': config.model.get('name') or config.model.backbone.type,
                                   **finite, **environment()})
