"""Evaluate a checkpoint on a config's test data: accuracy, box and mask AP, or mIoU, as a table or JSON."""
import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Optional

from .common import images
from .common.cli import UserError
from .common.output import dumps


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm and torchvision)

    from .train import add_config_arguments, config_with_options, is_classifier
    parser = argparse.ArgumentParser('subquad test', description=__doc__)
    add_config_arguments(parser)
    parser.add_argument('checkpoint', help='weights: .safetensors of subquad train, or a .pth')
    parser.add_argument('--show-dir', metavar='FOLDER', help='write pictures of what was found, beside the image and '
                        'its annotations where the config loads them')
    parser.add_argument('--tta', action='store_true', help='several scales and flips, as the config\'s tta_model says')
    parser.add_argument('--allow-nonfinite', action='store_true', help='test weights that hold NaN or infinities, too')
    parser.add_argument('--json', action='store_true', help='print JSON (null for a metric that is not finite)')
    parser.add_argument('--record', metavar='FILE', help='add the result, a JSON line, to FILE')
    args = parser.parse_args(argv)
    config, unreadable = config_with_options(args), images.reported()
    if is_classifier(config):
        if args.show_dir or args.tta:
            raise UserError('--show-dir and --tta are for detectors and segmenters (subquad visualize draws for '
                            'classifiers)')
        if not args.allow_nonfinite:
            _refuse_nonfinite(args.checkpoint)
        metrics, unit = evaluate(config, args.checkpoint, as_configured=bool(args.record)), ' %'
    else:
        from .engine.dense.evaluation import evaluate as evaluate_dense
        metrics, unit = evaluate_dense(config, args.checkpoint, args.show_dir, args.tta,
                                       args.allow_nonfinite), ''
    images.say_count(unreadable)
    from mmengine.dist import is_main_process
    if not is_main_process():
        return 0
    if not metrics:
        print('nothing was found in any image: no metrics', file=sys.stderr)
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    if args.record:
        _record(args.record, config, args, finite)
    if args.json:
        print(dumps(metrics))
    else:
        for name, value in metrics.items():
            print(f'{name}  {value:.{2 if unit else 3}f}{unit}')
    return 0


def _refuse_nonfinite(checkpoint: str) -> None:
    """Refuse weights that hold NaN or infinities: their metrics mean nothing.

    Raises:
        UserError: such a file, or one that cannot be read.
    """
    from ..backbones.weights import NonFiniteError, WeightsError, check_finite, read_checkpoint
    try:
        weights, _, _ = read_checkpoint(checkpoint)
        check_finite(weights, checkpoint)
    except NonFiniteError as error:
        raise UserError(f'{error}; --allow-nonfinite tests it anyway') from error
    except WeightsError as error:
        raise UserError(str(error)) from error


def _record(path: str, config, args: argparse.Namespace, metrics: Dict[str, Optional[float]]) -> None:
    """Add what was tested, how and with what result to a file of JSON lines.

    Raises:
        UserError: the file cannot be written.
    """
    from .common.paths import expanded
    from .engine.records import append, environment
    options = ' '.join([f'{key}={value}' for key, value in (args.cfg_options or {}).items()] + ['--tta'] * args.tta)
    try:
        append(expanded(path), {'config': Path(args.config).stem, 'options': options,
                                'model': config.model.get('name') or config.model.backbone.type,
                                **metrics, **environment()})
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror or error}') from error


def evaluate(config, checkpoint: str, as_configured: bool = False) -> Dict[str, float]:
    """Metrics of a checkpoint on the config's test data, in percent. Options of the model are the checkpoint's.

    Args:
        config: mmengine Config. checkpoint: file.
        as_configured: refuse a checkpoint whose options are not the config's.

    Raises:
        UserError: the config, the data or the checkpoint do not fit.
    """
    from ..backbones.weights import WeightsError, load_weights, read_checkpoint, some
    from .engine.classification.runner import NOT_OF_THE_NETWORK, build_runner, network
    from .engine.starting_weights import network_options
    try:
        _, facts, _ = read_checkpoint(checkpoint)
    except WeightsError as error:
        raise UserError(str(error)) from error
    if facts:        # options that change no weight's shape would go unnoticed: take them from the file
        if facts.get('model') != config.model.name:
            raise UserError(f"{checkpoint} is of {facts.get('model')}, the config of {config.model.name} "
                            '(--model NAME)')
        given = {key: value for key, value in config.model.items() if key not in NOT_OF_THE_NETWORK}
        options = network_options(facts, checkpoint)
        other = [key for key in {**given, **options} if given.get(key) != options.get(key)]
        if as_configured and other:
            raise UserError(f'--record: {checkpoint} has {other[0]}={options.get(other[0])!r}, the config '
                            f'{given.get(other[0])!r}')
        config.model.update(options)
    with tempfile.TemporaryDirectory() as folder:       # mmengine insists on a folder for its log
        runner = build_runner(config, folder, training=False)
        classes = list(runner.test_dataloader.dataset.classes)
        if facts and facts.get('classes', classes) != classes:
            raise UserError(f"{checkpoint} knows the classes {some(facts['classes'])}, the data has {some(classes)}")
        try:
            load_weights(network(runner), checkpoint)
        except WeightsError as error:
            raise UserError(str(error)) from error
        metrics = runner.test()
        for handler in list(runner.logger.handlers):
            handler.close()
            runner.logger.removeHandler(handler)        # mmengine would go on writing to it
    return {name: float(value) for name, value in metrics.items()}


if __name__ == '__main__':
    from .common.cli import run
    run(main)
