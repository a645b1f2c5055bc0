"""Evaluate a checkpoint on a config's test data: accuracy, box and mask AP, or mIoU, as a table or JSON."""
import argparse
import math
import sys
from pathlib import Path
from typing import Dict, List, Optional

from .common import images
from .common.cli import UserError
from .common.output import dumps
from .common.paths import expanded
from .engine.config_arguments import add_config_arguments, config_with_options, is_classifier


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm and torchvision)
    parser = argparse.ArgumentParser('subquad test', description=__doc__)
    add_config_arguments(parser, 'report it on stderr; an image folder skips it or uses the next image of its '
                         'class; a detector or segmenter gets a black image')
    parser.add_argument('checkpoint', help='weights: a .safetensors file of subquad train, a .pth file, or the '
                        'name of published weights such as ppma_tiny.in1k')
    parser.add_argument('--show-dir', metavar='FOLDER',
                        help='write pictures of the predictions, beside the annotations '
                        'if the config loads them (detectors and segmenters)')
    parser.add_argument('--tta', action='store_true',
                        help='test at several scales and flips, as the config\'s tta_model and tta_pipeline define')
    parser.add_argument('--allow-nonfinite', action='store_true', help='accept weights that hold NaN or infinities')
    parser.add_argument('--json', action='store_true', help='print JSON, with null for metrics that are not finite')
    parser.add_argument('--record', metavar='FILE', help='append the result to FILE as a line of JSON')
    args = parser.parse_args(argv)
    config, unreadable = config_with_options(args), images.reported()
    metrics = _evaluate(config, args)
    images.say_count(unreadable)
    from mmengine.dist import is_main_process
    if not is_main_process():
        return 0
    if not metrics:
        print('no metrics: the model found nothing in any image', file=sys.stderr)
    if args.record:
        _record(config, args, metrics)
    if args.json:
        print(dumps(metrics))
        return 0
    for name, value in metrics.items():
        print(f'{name}  {value:.2f} %' if name.startswith('accuracy/') else f'{name}  {value:.3f}')
    return 0


def _evaluate(config, args: argparse.Namespace) -> Dict[str, float]:
    if not is_classifier(config):
        from .engine.dense.evaluation import evaluate
        return evaluate(config, args.checkpoint, args.show_dir, args.tta, args.allow_nonfinite)
    if args.show_dir or args.tta:
        raise UserError('--show-dir and --tta are for detectors and segmenters (use subquad visualize for '
                        'classifiers)')
    from .engine.classification.evaluation import evaluate
    return evaluate(config, args.checkpoint, as_configured=bool(args.record), allow_nonfinite=args.allow_nonfinite)


def _record(config, args: argparse.Namespace, metrics: Dict[str, float]) -> None:
    """Append the config, the options, the metrics and the machine to a file of JSON lines.

    Raises:
        UserError: the file cannot be written.
    """
    from .engine.records import append, environment
    options = ' '.join([f'{key}={value}' for key, value in (args.cfg_options or {}).items()] + ['--tta'] * args.tta)
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    try:
        append(expanded(args.record), {'config': Path(args.config).stem, 'options': options,
                                       'model': config.model.get('name') or config.model.backbone.type,
                                       **finite, **environment()})
    except OSError as error:
        raise UserError(f'cannot write {args.record}: {error.strerror or error}') from error


if __name__ == '__main__':
    from .common.cli import run
    run(main)
