"""From the words of a command line to files: find the model, choose the formats, export to each."""
import sys
from pathlib import Path
from typing import Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from ...backbones.weights.registry import SCHEME, WEIGHTS
from ..common.cli import UserError, quiet
from .calibration import calibration_images
from .formats import FORMATS, Options, check_options, exporter, install_command, missing_packages
from .pipeline import Report, export
from .subject import Subject, classifier_from, classifier_subject


class Request(NamedTuple):
    """What to export.

    Attributes:
        model: timm name, name of published weights, weight file, or name or path of a config.
        checkpoint: weight file, name of published weights, or their tag; None for random weights.
        size: height and width; None for the model's own.
        features: feature maps instead of the result.
        normalize: put the normalization into the graph.
        allow_nonfinite: accept weights that hold NaN or infinities.
    """
    model: str
    checkpoint: Optional[str] = None
    size: Optional[Tuple[int, int]] = None
    features: bool = False
    normalize: bool = False
    allow_nonfinite: bool = False


def finder(request: Request) -> Callable[[str], Subject]:
    """Return the function that builds the subject for a format; detectors differ by format.

    Raises:
        UserError: Model or weights are unknown or do not match, or the model does not take images of this size.
    """
    from ..engine.counting.counting_configs import is_config
    request = _with_config(request)
    if not Path(request.model).suffix == '.safetensors' and is_config(request.model):
        return _config_finder(request)
    read, weights = classifier_from(request.model, request.checkpoint, request.allow_nonfinite)
    if weights == 'random':
        _note_random(request.model)
    subject = classifier_subject(read, weights, request.size, request.features, request.normalize)
    return lambda name: subject


def _with_config(request: Request) -> Request:
    """Replace the name of a published detector by its config, and a tag of weights for a config by their name."""
    for weights in WEIGHTS.values():
        if weights.config and request.checkpoint is None and request.model in (weights.name, SCHEME + weights.name):
            return request._replace(model=weights.config, checkpoint=weights.name)
        if weights.config and weights.config == request.model and weights.tag == request.checkpoint:
            return request._replace(checkpoint=weights.name)
    return request


def _config_finder(request: Request) -> Callable[[str], Subject]:
    from ..engine.config import load
    from .subject import with_normalization
    with quiet():                              # for what MMDetection and MMSegmentation print
        config = load(request.model)
        from .dense_subject import dense_subject
    if request.checkpoint is None:
        _note_random(request.model)

    def find(name: str) -> Subject:
        subject = dense_subject(config, request.checkpoint, request.size, nms=name in ('onnx', 'ort'),
                                labels=name != 'ncnn', features=request.features,
                                allow_nonfinite=request.allow_nonfinite)
        return with_normalization(subject) if request.normalize else subject
    return find


def _note_random(model: str) -> None:
    print(f'note: no --checkpoint is given, so {model} is exported with random weights', file=sys.stderr)


def chosen_formats(names: Sequence[str], precision: str, dynamic: FrozenSet[str]) -> List[str]:
    """Return the formats to write; for 'all', those that are installed and support the options.

    Formats that 'all' leaves out are named on stderr.

    Raises:
        UserError: A named format is not installed or does not support the options, or 'all' leaves none.
    """
    options = Options(precision, dynamic)
    if 'all' not in names:
        for name in names:
            check_options(name, options)
            exporter(name)
        return list(dict.fromkeys(names))
    chosen = []
    for name in FORMATS:
        try:
            check_options(name, options)
            if missing_packages(name):
                raise UserError(f'the format {name} is not installed: {install_command(name)}')
        except UserError as error:
            print(f'left out: {error}', file=sys.stderr)
        else:
            chosen.append(name)
    if not chosen:
        raise UserError('no installed format supports these options (see above)')
    return chosen


def export_formats(
        find: Callable[[str], Subject],
        formats: Sequence[str],
        folder: Path,
        precision: str = 'fp32',
        dynamic: FrozenSet[str] = frozenset(),
        calibrate: Sequence[str] = (),
        count: int = 64,
        tolerance: Optional[float] = None,
        repeats: int = 20,
) -> Tuple[List[Report], Dict[str, str]]:
    """Export to several formats; a format that fails does not stop the others.

    Args:
        find: What `finder` returns.
        formats: Names of formats.
        folder: Folder for the files.
        precision: 'fp32', 'fp16' or 'int8'.
        dynamic: Dimensions that the files leave open.
        calibrate: Image files or folders for int8.
        count: Largest number of these images.
        tolerance: see `pipeline.export`.
        repeats: see `pipeline.export`.

    Returns:
        The reports, and the error of each format that failed.

    Raises:
        UserError: There is only one format, and it fails.
    """
    reports, failures = [], {}
    for name in formats:
        try:
            print(f'exporting to {name}', file=sys.stderr, flush=True)
            subject = find(name)
            options = Options(precision, dynamic,
                              calibration_images(subject, calibrate, count) if calibrate else [])
            reports.append(export(subject, name, folder / file_name(subject, name, precision), options, tolerance,
                                  repeats))
        except UserError as error:
            if len(formats) == 1:
                raise
            failures[name] = str(error)
    return reports, failures


def file_name(subject: Subject, name: str, precision: str) -> str:
    """Return the name of an exported file, such as 'ppma_tiny_features_fp16.onnx'."""
    parts = [Path(subject.name).stem]
    parts += ['features'] if subject.task == 'features' else []
    parts += [precision] if precision != 'fp32' else []
    return '_'.join(parts) + FORMATS[name].suffix
