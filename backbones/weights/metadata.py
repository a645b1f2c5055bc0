"""Check the metadata of weight files: types and bounds of the model's options, classes and transform.

Metadata come from a file that anybody may have written, so no value is used before it has been checked.
"""
import ast
import inspect
import typing
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import timm

from ..options import Option, Options, check, integer, known_options, number, one_of, or_none
from .errors import WeightsError, some

# Bounds of the numeric options of timm's own networks. Other numbers are at most LARGEST. Depths need a bound of their
# own, because a network with a huge depth would take forever to build.
LARGEST = 100_000
BOUNDS: Dict[str, Tuple[float, float]] = {
    'depths': (1, 100), 'depth': (1, 100), 'layers': (1, 100), 'num_layers': (1, 100), 'num_blocks': (1, 100),
    'depth_multiplier': (0, 10), 'dims': (1, 8192), 'dim': (1, 8192), 'embed_dim': (1, 8192), 'num_heads': (1, 512),
    'mlp_ratios': (0, 32), 'mlp_ratio': (0, 32), 'img_size': (1, 2048), 'in_chans': (1, 1024), 'drop_rate': (0, 1),
    'drop_path_rate': (0, 1)}
# Options of every timm classifier, also if its class takes only **kwargs.
TIMM_OPTIONS = ('num_classes', 'in_chans', 'img_size', 'global_pool', 'drop_rate', 'drop_path_rate')
_NOT_OPTIONS = ('self', 'device', 'dtype', 'kwargs', 'args')
_SIDE = 2048
_CONFIG_BYTES = 2_000_000


def _one_or_some(one: Option, counts: Tuple[int, ...], allowed: str) -> Option:
    """A value that `one` accepts, or a list of so many of them."""
    return Option(allowed, lambda value: one.accepts(value) or (
        isinstance(value, (list, tuple)) and len(value) in counts and all(map(one.accepts, value))))


_TRANSFORM: Options = {
    'input_size': _one_or_some(integer(1, _SIDE), (1, 2, 3),
                               f'an integer, (height, width) or (channels, height, width) of 1 to {_SIDE}'),
    'mean': _one_or_some(number(-1e4, 1e4), (1, 3), '3 numbers from -10000 to 10000'),
    'std': _one_or_some(number(1e-4, 1e4), (1, 3), '3 numbers from 0.0001 to 10000'),
    'crop_pct': or_none(number(0.01, 10)),
    'interpolation': one_of('nearest', 'bilinear', 'bicubic', 'lanczos', 'box', 'hamming'),
    'crop_mode': one_of(None, 'center', 'squash', 'border'),
    'crop_border_pixels': or_none(integer(0, _SIDE)),
    'is_training': one_of(False)}
# Arguments that timm's create_transform ignores in evaluation.
_TRAINING_ONLY = ('no_aug', 'scale', 'ratio', 'hflip', 'vflip', 'color_jitter', 'color_jitter_prob', 'grayscale_prob',
                'gaussian_blur_prob', 'auto_augment', 're_prob', 're_mode', 're_count', 're_num_splits',
                'train_crop_mode')


def check_metadata(metadata: Any, name: str) -> None:
    """Check the types of the metadata of a weight file.

    Args:
        metadata: the metadata, of any type.
        name: the name of the file, for the message.

    Raises:
        WeightsError: an entry has another type than `subquad train` writes.
    """
    if not isinstance(metadata, dict):
        raise WeightsError(f'{name}: the metadata must be a JSON object, got a {type(metadata).__name__}')
    for key, what, is_valid in (('model', 'a name', lambda v: isinstance(v, str) and 0 < len(v) <= 200),
                            ('options', 'an object', lambda v: isinstance(v, dict)),
                            ('transform', 'an object', lambda v: v is None or isinstance(v, dict)),
                            ('network', 'an object', lambda v: isinstance(v, dict)),
                            ('provenance', 'an object', lambda v: isinstance(v, dict)),
                            ('classes', 'a list of names', lambda v: isinstance(v, list) and all(
                                isinstance(item, str) and len(item) <= 1000 for item in v))):
        if key in metadata and not is_valid(metadata[key]):
            raise WeightsError(f'{name}: {key} in the metadata must be {what}, got {_describe(metadata[key])}')


def dataset_classes(runner_meta: Dict[str, Any]) -> List[str]:
    """Return the class names that a checkpoint of MMEngine's Runner stores beside the weights, or an empty list."""
    dataset = runner_meta.get('dataset_meta')
    classes = dataset.get('classes', dataset.get('CLASSES')) if isinstance(dataset, dict) else None
    valid = isinstance(classes, (list, tuple)) and all(isinstance(word, str) for word in classes)
    return list(classes) if valid else []


def numbered(count: int) -> List[str]:
    """Return names for the classes of data that do not name them."""
    return [f'class {n}' for n in range(count)]


def class_difference(theirs: Optional[Sequence[str]], ours: Sequence[str]) -> str:
    """Say in a phrase that a file was trained on other classes than those of the data.

    Args:
        theirs: names of the classes of the file; empty or None if the file does not name them.
        ours: names of the classes of the data. WordNet ids equal the words of ImageNet's classes.

    Returns:
        The phrase, or '' if the classes are the same or unknown.
    """
    theirs, ours = list(theirs or ()), list(ours)
    if numbered(len(ours)) in (theirs, ours) and len(theirs) == len(ours):
        return ''
    info = timm.data.ImageNetInfo() if theirs and theirs != ours else None
    if info is None or (ours == info.label_names() and theirs == info.label_descriptions()):
        return ''
    return f'was trained on the classes {some(theirs, 6)}, but the data has {some(ours, 6)}'


def parse_config(text: Any) -> Dict[str, Any]:
    """Read a config as MMEngine writes it into checkpoints and work folders, without running it.

    Args:
        text: assignments of literals and of `dict(...)`; other statements are skipped.

    Returns:
        Values by name; {} for what is not such a text.
    """
    config: Dict[str, Any] = {}
    if not isinstance(text, str) or len(text) > _CONFIG_BYTES:
        return config
    try:
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                try:
                    config[statement.targets[0].id] = _literal(statement.value)
                except (ValueError, TypeError):
                    continue
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return config


def check_options(model: str, options: Dict[str, Any], name: str) -> Dict[str, Any]:
    """Check the model options that a weight file or the config in a checkpoint contains.

    Only options of the network's class are allowed, with valid types and within bounds. So a file cannot set timm's own
    arguments (`checkpoint_path`, `pretrained_cfg`, ...) or build an arbitrarily large network.

    Args:
        model: the timm name of an existing model.
        options: the options for `timm.create_model`.
        name: the name of the file, for messages.

    Returns:
        A copy of the options.

    Raises:
        WeightsError: the model does not have an option, or a value is not allowed.
    """
    cls = typing.get_type_hints(timm.models.model_entrypoint(model)).get('return')
    bounded = known_options(cls) if inspect.isclass(cls) else {}
    if bounded:
        try:
            check(model, bounded, options)
        except (TypeError, ValueError) as error:
            raise WeightsError(f'{name}: {error}') from error
        return dict(options)
    known = _arguments(cls)
    for key, value in options.items():
        if key not in known:
            raise WeightsError(f'{name}: {model} has no option {_describe(key)}; it has {some(sorted(known), 30)}')
        low, high = BOUNDS.get(key, (-LARGEST, LARGEST))
        if not _is_simple_value(value, low, high):
            raise WeightsError(f'{name}: {key} of {model} must be a number, a name, true or false, or a list of them'
                               f"{f', from {low:g} to {high:g}' if key in BOUNDS else ''}, got {_describe(value)}")
    return dict(options)


def check_transform(transform: Dict[str, Any], name: str) -> Dict[str, Any]:
    """Check the evaluation transform that a weight file contains.

    Args:
        transform: arguments of `timm.data.create_transform`. Those of training are dropped.
        name: the name of the file, for messages.

    Returns:
        The arguments for evaluation.

    Raises:
        WeightsError: an argument is unknown, or a value is not allowed.
    """
    transform = {key: value for key, value in transform.items() if key not in _TRAINING_ONLY}
    for key, value in transform.items():
        if key not in _TRANSFORM:
            raise WeightsError(f'{name}: transform has no option {_describe(key)}; it has {some(list(_TRANSFORM), 30)}')
        if not _TRANSFORM[key].accepts(value):
            raise WeightsError(f'{name}: {key} of the transform must be {_TRANSFORM[key].allowed}, got '
                               f'{_describe(value)}')
    return dict(transform)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal or of `dict(key=literal, ...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'dict' and not node.args:
        return {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_literal(item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict):
        return {_literal(key) if key else None: _literal(value) for key, value in zip(node.keys, node.values)}
    return ast.literal_eval(node)


def _arguments(cls: Any) -> Set[str]:
    """Return the names of the constructor arguments of a timm network and of its base classes."""
    known = set(TIMM_OPTIONS)
    for base in cls.__mro__ if inspect.isclass(cls) else ():
        if '__init__' in vars(base) and not base.__module__.startswith(('torch.', 'builtins')):
            known |= {key for key, parameter in inspect.signature(base.__init__).parameters.items()
                      if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    return known.difference(_NOT_OPTIONS)


def _is_simple_value(value: Any, low: float, high: float) -> bool:
    """True for a bool, a short name, None, a number within bounds, or a list of at most 16 of them."""
    if isinstance(value, (list, tuple)):
        return len(value) <= 16 and all(not isinstance(v, (list, tuple)) and _is_simple_value(v, low, high)
                                       for v in value)
    if isinstance(value, str):
        return len(value) <= 64 and value.isprintable() and not set(value) & set('/\\:')
    return value is None or isinstance(value, bool) or number(low, high).accepts(value)


def _describe(value: Any, most: int = 60) -> str:
    """Return a value as text for a message; long texts are cut."""
    if isinstance(value, (dict, list, tuple)) and len(value) > 16:
        return f'a {type(value).__name__} of {len(value)}'
    try:
        text = ascii(value)
    except (ValueError, RecursionError):          # huge integers; unbounded nesting
        return f'a {type(value).__name__}'
    return text if len(text) <= most else f'{text[:most]}...'
