"""Evaluate a classifier's weights on the test data of a config."""
import tempfile
from typing import Any, Dict, List, Optional, Sequence

import torch
from mmengine.runner import Runner

from ....backbones.prepare import prepare
from ....backbones.weights import check_finite, load_state_dict, read_file
from ....backbones.weights.metadata import class_difference
from ....backbones.weights.resolve import resolve
from ...common.cli import UserError, weight_errors
from ..training.building import close_log, made
from ..training.runner import build_runner
from ..weights.starting_weights import network_options, say
from .class_report import ClassReport
from .prediction_metrics import CalibrationMetric
from .task import timm_model
from .throughput import Stopwatch, loader_rate
from .views import EvaluatedNet, view_transform
from .weight_files import WRAPPER_ARGUMENTS, own_metadata, recorded_transform, transform_differences, values

# The path of the arguments of the test transform in a config.
_TRANSFORM = 'test_dataloader.dataset.transform.'


def evaluate(config, checkpoint: str, as_configured: bool = False, allow_nonfinite: bool = True, *,
             choice: Optional[str] = None, tta: Optional[str] = None, throughput: bool = False,
             report: Optional[ClassReport] = None, given: Sequence[str] = ()) -> Dict[str, float]:
    """Compute the metrics of a checkpoint on the config's test data: accuracies and calibration in percent.

    The model is built with the options that the checkpoint holds, and images are prepared as it records.

    Args:
        config: MMEngine Config; the checkpoint's options and transform are written into it.
        checkpoint: File of weights, or the name of published ones.
        as_configured: Refuse a checkpoint whose options differ from the config's.
        allow_nonfinite: Evaluate weights that hold NaN or infinities.
        choice: 'averaged' or 'raw' weights of a file that holds both; None for the averaged ones.
        tta: A mode of `view_transform`: the probabilities of several views of each image are
            averaged.
        throughput: Measure throughput/model and throughput/loader, in images per second.
        report: Receives the predictions.
        given: Dotted keys of the config whose values the command gives; they override the settings of the file.
    """
    with weight_errors('; --allow-nonfinite tests it anyway'):
        content = read_file(resolve(checkpoint), choice)
        if not allow_nonfinite:
            check_finite(content.weights, checkpoint)
        metadata, transform = own_metadata(content, checkpoint), recorded_transform(checkpoint, content)
    if content.choice:
        say(f'{checkpoint}: {content.choice}')
    elif choice and not content.source:
        raise UserError(f'{checkpoint} holds one set of weights and does not say which; leave --ema and --raw out')
    if metadata:
        _take_options(config, checkpoint, metadata, as_configured)
    _take_transform(config, checkpoint, transform, as_configured, given)
    with tempfile.TemporaryDirectory() as folder:       # MMEngine requires a folder for its log
        runner = build_runner(config, folder, training=False)
        classes = list(runner.test_dataloader.dataset.classes)
        other = class_difference(content.classes, classes)
        if other:
            raise UserError(f'{checkpoint} {other}')
        with weight_errors():
            load_state_dict(timm_model(runner), content.weights, checkpoint)
        prepare(timm_model(runner).eval())
        metrics = _test(runner, config, classes, tta, throughput, report)
        close_log(runner)
    return {name: float(value) for name, value in metrics.items()}


def _test(runner: Runner, config, classes: List[str], tta: Optional[str], throughput: bool,
          report: Optional[ClassReport]) -> Dict[str, Any]:
    """Run the test loop, with the views, the classes and the measurements that are asked for."""
    dataset = runner.test_dataloader.dataset
    model = getattr(runner.model, 'module', runner.model)
    evaluator = made(lambda: runner.test_loop, 'test_evaluator').evaluator
    several = getattr(dataset, 'multi_label', None)
    if several is None:
        several = torch.as_tensor(dataset[0]['label']).ndim and getattr(dataset, 'correct', None) is None
    if several and (tta or report):
        raise UserError('--tta, --report and --out are for images with one class each, but these data have several '
                        'for each image, or one for each token')
    if tta:
        if getattr(dataset, 'transform', None) is None:
            raise UserError(f'--tta {tta} is for images')
        settings = config.test_dataloader.dataset.get('transform') or {}
        dataset.transform = view_transform(dataset.transform, tta, settings.get('crop_pct'))
    valid = getattr(dataset, 'valid', None)
    if tta or valid is not None:
        model.net = EvaluatedNet(model.net, bool(tta), valid)
    calibration = None if several else CalibrationMetric()
    if calibration:
        calibration.dataset_meta = dataset.metainfo
        evaluator.metrics.append(calibration)
    stopwatch = Stopwatch(model.net) if throughput else None
    metrics = runner.test()
    if stopwatch:
        metrics = {**metrics, 'throughput/model': stopwatch.rate(),
                   'throughput/loader': loader_rate(runner.test_dataloader)}
    predictions = getattr(calibration, 'predictions', None)              # on the main process only
    if predictions is not None and predictions.nonfinite:
        say(f'{predictions.nonfinite} of {len(predictions.labels)} images have scores that are NaN or infinite; they '
            'count as wrong')
    if predictions is not None and report:
        report.take(predictions, classes)
    return metrics


def _take_options(config, checkpoint: str, metadata: Dict[str, Any], as_configured: bool) -> None:
    """Write the checkpoint's options into the config: a wrong option can leave every shape of a weight the same."""
    given = {key: value for key, value in config.model.items() if key not in WRAPPER_ARGUMENTS}
    options = network_options(metadata, checkpoint, config.model)
    given.setdefault('num_classes', options.get('num_classes'))           # from the data set, if the config has none
    other = [key for key in {**given, **options} if given.get(key) != options.get(key)]
    if as_configured and other:
        raise UserError(f'--record: {checkpoint} has {other[0]}={options.get(other[0])!r}, the config has '
                        f'{given.get(other[0])!r}')
    config.model.update(options)


def _take_transform(config, checkpoint: str, theirs: Dict[str, Any], as_configured: bool, given: Sequence[str]) -> None:
    """Write the checkpoint's transform into the config, except what the command gives, and say so if they differ."""
    ours = config.test_dataloader.dataset.get('transform')
    other = transform_differences(theirs, ours) if theirs and ours else {}
    fixed = {key: pair for key, pair in other.items() if f'{_TRANSFORM}{key}' in given}
    taken = {key: pair for key, pair in other.items() if key not in fixed}
    if taken and as_configured:
        raise UserError(f'--record: {checkpoint} has {values(taken, 0)}, the config has {values(taken, 1)}')
    if fixed:
        say(f'images are prepared with {values(fixed, 1)}; {checkpoint} has {values(fixed, 0)}')
    if taken:
        ours.update({key: pair[0] for key, pair in taken.items()})
        say(f'images are prepared with {values(taken, 0)}, as {checkpoint} records; the config has {values(taken, 1)} '
            f'(--cfg-options {_TRANSFORM}KEY=VALUE chooses otherwise)')
