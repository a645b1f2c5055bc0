"""Load classifiers from weight files, with their options, classes and image transforms."""
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import timm
import timm.data
from timm.data.constants import DEFAULT_CROP_PCT, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from ....backbones.weights import (
    WeightsError,
    check_finite,
    check_options,
    checkpoint_filter_fn,
    load_state_dict,
    match_to_model,
    read_file,
    read_metadata,
    shorten_path,
)
from ....backbones.weights.files import WeightFile
from ....backbones.weights.metadata import check_metadata, check_transform, parse_config
from ....backbones.weights.registry import PublishedWeights
from ....backbones.weights.resolve import published, resolve
from ...common.cli import UserError, one_line, weight_errors
from ..zoo import create, our_models

# Arguments of TimmClassifier itself; all others are options of the timm model.
WRAPPER_ARGUMENTS = ('type', 'name', 'label_smoothing', 'grad_checkpointing', 'data_preprocessor', 'distillation',
                     'trainable', 'channels_last', 'bce')
# Keys under which MMEngine's Runner keeps weights: the average, and with EMA the raw ones.
_RUNNERS = ('state_dict', 'ema_state_dict')
# Arguments of timm's create_transform that decide how a test image is prepared.
_SETTINGS = ('input_size', 'mean', 'std', 'interpolation', 'crop_pct', 'crop_mode', 'crop_border_pixels')


class Classifier(NamedTuple):
    """The classifier of a weight file."""
    model: Any                # the network, in eval mode
    name: str                 # its timm name
    options: Dict[str, Any]   # the options that differ from the defaults of that name; they may include `num_classes`
    classes: List[str]        # names of the classes; an empty list if the file does not name them
    # arguments of `timm.data.create_transform`, with the default values of those that the file leaves out; an
    # empty dict if the file defines none
    transform: Dict[str, Any]
    metadata: Dict[str, Any]  # all metadata of the file


def classifier_from_file(checkpoint: str, name: Optional[str] = None,
                         allow_nonfinite: bool = False) -> Tuple[Any, Any, List[str]]:
    """Load a classifier: (model in eval mode, transform of PIL images, class names).

    Model, options, classes and transform are read from a .safetensors file of `subquad train`, or from the config that
    a Runner's .pth holds or that lies beside it; for published weights, they are known. If the transform is unknown,
    the model's default is used and a message on stderr says so. So it does if a file holds averaged and raw weights.

    Args:
        checkpoint: A file of `subquad train`, the name of published weights, or any other file together with `name`.
        name: timm name of the model, if the file does not contain it.
        allow_nonfinite: Accept weights that hold NaN or infinities.
    """
    read = read_classifier(checkpoint, name, allow_nonfinite)
    path, model = shorten_path(checkpoint), read.model
    if getattr(model, 'in_chans', 3) != 3:
        raise UserError(f'{path}: the model takes images of {model.in_chans} channels, and image files are read as RGB')
    transform = read.transform or assumed_transform(read, path)
    try:
        transform = timm.data.create_transform(**transform)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f'{path}: transform: {one_line(error)}') from error
    model.multi_label = read.metadata.get('multi_label', False)
    return model, transform, read.classes or [str(n) for n in range(model.num_classes)]


def read_classifier(checkpoint: str, name: Optional[str] = None, allow_nonfinite: bool = False) -> Classifier:
    """Build the classifier of a weight file, and read what the file says; arguments as of `classifier_from_file`."""
    path = shorten_path(checkpoint)
    with weight_errors('; predict, test and visualize take it with --allow-nonfinite'):
        entry = published(checkpoint)
        known = _published_metadata(entry) if entry else {}
        file = resolve(checkpoint)
        content = read_file(file)
        metadata = _metadata(file, content) if 'model' in content.metadata or not entry else known
        if not name and 'model' not in metadata:
            raise UserError(f'{path} does not name its model: give --model NAME (subquad models lists them)')
        same = name in (None, metadata.get('model'))
        name = name or metadata['model']
        model, options = _fitting_model(name, metadata.get('options', {}) if same else {}, content.weights, path)
        if not allow_nonfinite:
            check_finite(content.weights, path)
        load_state_dict(model, content.weights, path)
        if content.choice:
            print(f'{path}: {content.choice}', file=sys.stderr)
        transform = check_transform((metadata.get('transform') if same else None) or {}, path)
        transform = with_defaults(transform) if transform else {}
    classes = metadata.get('classes') or []
    if classes and len(classes) != model.num_classes:
        raise UserError(f'{path} names {len(classes)} classes for a model of {model.num_classes}')
    return Classifier(model, name, options, classes, transform, metadata)


def sketch(name: str, options: Dict[str, Any], weights: Dict[str, Any]) -> Tuple[Any, Dict[str, Any]]:
    """Build a classifier on the meta device with what a file's weights say, such as classes: (model, options)."""
    model = create(name, **options, device='meta')
    classifier = timm.get_pretrained_cfg_value(name, 'classifier')
    given = checkpoint_filter_fn(weights, model)
    layer = given.get(f'{classifier}.weight')
    more = getattr(model, 'options_in', lambda weights: {})(given)
    if not more.keys() <= options.keys():
        options = {**more, **options}
        model = create(name, **options, device='meta')
    if 'num_classes' not in options and layer is not None and layer.ndim and len(layer) != model.num_classes:
        options = dict(options, num_classes=len(layer))
        model = create(name, **options, device='meta')
    return model, options


def _fitting_model(name: str, options: Dict[str, Any], weights: Dict[str, Any],
                   path: str) -> Tuple[Any, Dict[str, Any]]:
    """Build the model in eval mode, first without memory, so that a file cannot demand more memory than it fills.

    Returns:
        The model, and its options, with the number of classes of the file.
    """
    if not timm.is_model(name):
        create(name)                                         # raises, with the nearest names
    options = check_options(name, options, path)
    try:
        try:
            model, options = sketch(name, options, weights)
            match_to_model(weights, model, path)
        except (UserError, NotImplementedError, RuntimeError, TypeError) as error:
            if name in our_models():
                raise UserError(f'{path}: {one_line(error)}') from error
            # Some networks of timm need real numbers in their constructor; they are compared afterwards.
        return create(name, **options).eval(), options
    except (AssertionError, AttributeError, ArithmeticError, LookupError, NotImplementedError, RuntimeError,
            TypeError) as error:                             # errors of timm's networks for unknown options
        raise UserError(f'{path}: {name} cannot be built with its options: {one_line(error)}') from error


def with_defaults(transform: Dict[str, Any]) -> Dict[str, Any]:
    """Add what `timm.data.create_transform` takes if a transform for evaluation leaves it out, for other programs."""
    defaults = dict(input_size=224, interpolation='bilinear', mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    found = {**defaults, **transform, 'crop_pct': transform.get('crop_pct') or DEFAULT_CROP_PCT}
    size = found['input_size']
    return {**found, 'input_size': (3, size, size) if isinstance(size, int) else tuple(size)}


def assumed_transform(read: Classifier, path: str) -> Dict[str, Any]:
    """Return the model's own transform, and say on stderr that it is assumed."""
    transform = timm.data.resolve_model_data_config(read.model)
    numbers = {key: ', '.join(f'{value:g}' for value in transform[key]) for key in ('mean', 'std')}
    size = ' x '.join(map(str, transform['input_size'][-2:]))
    print(f"{path} does not say how to preprocess images; assuming the settings of {read.name} (size {size}, mean "
          f"{numbers['mean']}, standard deviation {numbers['std']})", file=sys.stderr)
    return transform


def own_metadata(content: WeightFile, path: str) -> Dict[str, Any]:
    """Return the known ones of model, options, classes and transform of a file: its metadata, or its Runner's config.
    """
    if content.metadata or content.source not in _RUNNERS:
        return content.metadata
    metadata = config_metadata(content.runner_meta.get('cfg'))
    if metadata and content.classes:
        metadata['classes'] = content.classes
    check_metadata(metadata, path)
    return metadata


def recorded_transform(checkpoint: str, content: WeightFile) -> Dict[str, Any]:
    """Return the transform that a file records for test images, or that of published weights; {} if it is unknown."""
    entry = published(checkpoint)
    known = _published_metadata(entry) if entry and not content.metadata else own_metadata(content, checkpoint)
    return check_transform(known.get('transform') or {}, checkpoint)


def transform_differences(theirs: Dict[str, Any], ours: Dict[str, Any]) -> Dict[str, Tuple[Any, Any]]:
    """Return {argument: (theirs, ours)} where two transforms prepare test images differently.

    Args:
        theirs, ours: Arguments of `timm.data.create_transform`; what they leave out has its default value.
    """
    theirs, ours = _settings(theirs), _settings(ours)
    found = {key: (theirs[key], ours[key]) for key in _SETTINGS if theirs[key] != ours[key]}
    resized = [[int(side / each['crop_pct']) for side in each['input_size'][1:]] for each in (theirs, ours)]
    if 'input_size' not in found and resized[0] == resized[1]:
        found.pop('crop_pct', None)                              # 0.888 and 256 / 288
    return found


def values(differences: Dict[str, Tuple[Any, Any]], side: int) -> str:
    """Return 'argument=value, ...' of one side of `transform_differences` for a message."""
    return ', '.join(f'{key}={pair[side]!r}' for key, pair in differences.items())


def _settings(transform: Dict[str, Any]) -> Dict[str, Any]:
    found = {'crop_mode': None, 'crop_border_pixels': None, **with_defaults(transform)}
    for key in ('mean', 'std'):
        value = found[key]
        value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        found[key] = value * 3 if len(value) == 1 else value
    return {**found, 'crop_mode': found['crop_mode'] or 'center'}


def _metadata(path: Path, content: WeightFile) -> Dict[str, Any]:
    """Return what `own_metadata` does or, for a Runner's checkpoint without its config, what files beside it hold."""
    metadata = own_metadata(content, str(path))
    if content.metadata or content.source not in _RUNNERS:
        return metadata
    for file in sorted(path.parent.glob('*.py')) if not metadata else ():
        metadata = config_metadata(file.read_text('utf-8', 'replace'))
        if metadata:
            print(f'the model and its transform are read from {file}', file=sys.stderr)
            break
    if metadata and content.classes:
        metadata['classes'] = content.classes
    for file in (path.parent / 'best.safetensors', path.parent / 'last.safetensors'):
        try:
            beside = read_metadata(file) if 'classes' not in metadata and file.is_file() else {}
        except WeightsError:
            continue                                         # the damaged file is not the requested one
        if beside.get('model') and not metadata:
            metadata = {key: beside[key] for key in ('model', 'options', 'classes', 'transform') if key in beside}
            print(f'the model, its classes and its transform are read from {file}', file=sys.stderr)
        elif metadata and all(beside.get(key) == metadata[key] for key in ('model', 'options')) and 'classes' in beside:
            metadata['classes'] = beside['classes']
    check_metadata(metadata, str(path))
    return metadata


def _published_metadata(entry: PublishedWeights) -> Dict[str, Any]:
    """Return model, options, classes and transform of published weights whose file does not hold them."""
    if entry.task != 'classification':
        raise UserError(f'{entry.name} are weights for {entry.task}, but a classifier is needed (`subquad predict '
                        f'{entry.name} IMAGES` runs them with their config)')
    names = map(str, range(entry.num_classes))
    names = timm.data.ImageNetInfo().label_descriptions() if entry.num_classes == 1000 else names
    return dict(model=entry.arch, options=dict(num_classes=entry.num_classes, **entry.options), classes=[*names],
                transform=published_transform(entry))


def published_transform(entry: PublishedWeights) -> Dict[str, Any]:
    """Return the arguments of `timm.data.create_transform` for the test images of published weights."""
    crop_mode = ('crop_mode',) if entry.crop_mode != 'center' else ()
    return {key: getattr(entry, key)
            for key in ('input_size', 'crop_pct', *crop_mode, 'mean', 'std', 'interpolation')}


def config_metadata(text: Any) -> Dict[str, Any]:
    """Return dict(model, options, transform, multi_label) from the text of a config, {} if it is no classifier's.

    The text is not run; see `parse_config`.
    """
    config = parse_config(text)
    model = config.get('model')
    if not isinstance(model, dict) or model.get('type') != 'TimmClassifier' or not isinstance(model.get('name'), str):
        return {}
    loaders = (config.get(f'{part}_dataloader') for part in ('test', 'val', 'train'))
    loader = next((loader for loader in loaders if isinstance(loader, dict)), {})
    dataset = loader.get('dataset')
    transform = dataset.get('transform') if isinstance(dataset, dict) else None
    return dict(model=model['name'],
                options={key: value for key, value in model.items() if key not in WRAPPER_ARGUMENTS},
                transform={key: value for key, value in transform.items() if key != 'is_training'}
                if isinstance(transform, dict) else None,
                **(dict(multi_label=True) if isinstance(dataset, dict) and dataset.get('multi_label') else {}))
