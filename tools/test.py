"""Evaluate a checkpoint on a config's test data: accuracy and calibration, box and mask AP, or mIoU, as a table or
JSON. `subquad test FILE --data FOLDER` tests a file of `subquad export` on its own runtime."""
import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from ..backbones.weights import WeightsError
from ..backbones.weights.resolve import published
from .common import images
from .common.cli import UserError, add_weight_choice, quiet, shown
from .common.output import dumps
from .common.paths import writable_folder
from .engine.config import add_config_arguments, config_with_options, is_classifier
from .exporters.formats import format_of

_VIEWS = ('flip', 'five-crop', 'ten-crop')
_CLASSIFIERS_ONLY = ('labels', 'report', 'out', 'throughput')


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    argv = sys.argv[1:] if argv is None else argv
    if exported := next((word for word in argv if format_of(word)), None):
        return _test_exported(exported, argv)
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
    else:
        _show(metrics)
    if args.report and not args.json:
        report.show()
    if args.out:
        paths = report.write(writable_folder(args.out), metrics)
        print('written: ' + ', '.join(map(str, paths)), file=sys.stderr)
    return 0


def _show(metrics: Dict[str, float]) -> None:
    for name, value in metrics.items():
        percent = name.startswith(('accuracy/', 'agreement/', 'calibration/', 'multi_label/', 'model/top'))
        print(f'{name}  {value:.2f} %' if percent else f'{name}  {value:.3f}')


def _test_exported(file: str, argv: List[str]) -> int:
    """Test an exported file, beside the PyTorch model if its weights are at hand."""
    from .exporters.exported import ExportedModel, test_classifier
    parser = argparse.ArgumentParser('subquad test FILE', description='Test a file of subquad export on its own '
                                     'runtime: accuracy and agreement with the PyTorch model, box AP, or mIoU, and the '
                                     'median time of an image.')
    parser.add_argument('file', metavar='FILE', help='file of subquad export')
    parser.add_argument('--data', metavar='FOLDER', required=True, help='folder with a subfolder of images for each '
                        'class, or with val above them; for detectors and segmenters, the data_root of their config')
    parser.add_argument('--weights', metavar='NAME_OR_FILE', help='weights of the PyTorch model to compare with '
                        '(default: published weights that the file names)')
    parser.add_argument('--config', metavar='CONFIG', help='config of a detector or segmenter (default: the one that '
                        'the file names)')
    parser.add_argument('--threads', type=int, default=1, metavar='N', help='threads of the runtime (default: 1)')
    parser.add_argument('--json', action='store_true', help='print JSON, with null for metrics that are not finite')
    args = parser.parse_args(argv)
    if args.threads < 1:
        raise UserError(f'--threads must be at least 1, got {args.threads}')
    model = ExportedModel(file, args.threads)
    weights = args.weights or _published(model.metadata['weights'])
    if not weights:
        print(f"note: the file was made of {shown(model.metadata['weights'])}; to compare it with the PyTorch model, "
              'give --weights', file=sys.stderr)
    if model.metadata['task'] == 'classification':
        other, prepare = None, None
        if weights:
            from .engine.classification.weight_files import classifier_from_file
            other, prepare, _ = classifier_from_file(weights, model.metadata['model'] if args.weights else None)
        metrics = test_classifier(model, args.data, other, prepare)
    else:
        metrics = _test_dense(model, args, weights)
    print(dumps(metrics)) if args.json else _show(metrics)
    return 0


def _published(weights: str) -> Optional[str]:
    """Return the name if it is one of published weights."""
    try:
        return weights if published(weights) else None
    except WeightsError:
        return None


def _test_dense(model: Any, args: argparse.Namespace, weights: Optional[str]) -> Dict[str, float]:
    config = config_with_options(argparse.Namespace(
        config=args.config or model.metadata['model'], data=args.data, cfg_options=None, strict=False, model=None))
    with quiet():                                             # for what MMDetection prints on import
        from .engine.dense.evaluation import evaluate
        from .exporters.exported_dense import ExportedNetwork, ExportedPredictor
    metrics = evaluate(config, ExportedNetwork(ExportedPredictor(model)))
    if weights:
        metrics.update({f'model/{name}': value for name, value in evaluate(config, weights).items()})
    return {**metrics, 'latency/median': statistics.median(model.milliseconds)}


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
