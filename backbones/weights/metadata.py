"""What a weight file says about its model is not trusted: types and bounds of options, classes and transform."""
import inspect
import typing
from typing import Any, Callable, Dict, Sequence, Set, Tuple

import timm

from ..options import check
from .errors import WeightsError, some

# Bounds of numbers in options of timm's own networks, by name; the rest are at most LARGEST. Depths are loops, which no
# other check ends.
LARGEST = 100_000
BOUNDS: Dict[str, Tuple[float, float]] = {
    'depths': (1, 100), 'depth': (1, 100), 'layers': (1, 100), 'num_layers': (1, 100), 'num_blocks': (1, 100),
    'depth_multiplier': (0, 10), 'dims': (1, 8192), 'dim': (1, 8192), 'embed_dim': (1, 8192), 'num_heads': (1, 512),
    'mlp_ratios': (0, 32), 'mlp_ratio': (0, 32), 'img_size': (1, 2048), 'in_chans': (1, 1024), 'max_levels': (1, 32),
    'readout_levels': (1, 32), 'drop_rate': (0, 1), 'drop_path_rate': (0, 1)}
# Of every classifier of timm, where its class does not name its arguments.
COMMON = ('num_classes', 'in_chans', 'img_size', 'global_pool', 'drop_rate', 'drop_path_rate')
_NOT_OPTIONS = ('self', 'device', 'dtype', 'kwargs', 'args')
_SIDE = 2048
_TRANSFORM: Dict[str, Tuple[Callable[[Any], bool], str]] = {
    'input_size': (lambda v: _sizes(v), f'an integer, (height, width) or (channels, height, width) of 1 to {_SIDE}'),
    'mean': (lambda v: _numbers(v, -1e4, 1e4), '3 numbers from -10000 to 10000'),
    'std': (lambda v: _numbers(v, 1e-4, 1e4), '3 numbers from 0.0001 to 10000'),
    'crop_pct': (lambda v: v is None or _number(v, 0.01, 10), 'a number from 0.01 to 10'),
    'interpolation': (lambda v: v in ('nearest', 'bilinear', 'bicubic', 'lanczos', 'box', 'hamming', 'random',
                                      'lanczos-aa', 'bicubic-aa', 'bilinear-aa'), 'the name of a filter'),
    'crop_mode': (lambda v: v in (None, 'center', 'squash', 'border'), "'center', 'squash' or 'border'"),
    'crop_border_pixels': (lambda v: v is None or _number(v, 0, _SIDE) and type(v) is int, f'from 0 to {_SIDE}'),
    'is_training': (lambda v: v is False, 'false')}
# What timm's create_transform ignores in evaluation.
_OF_TRAINING = ('no_aug', 'scale', 'ratio', 'hflip', 'vflip', 'color_jitter', 'color_jitter_prob', 'grayscale_prob',
                'gaussian_blur_prob', 'auto_augment', 're_prob', 're_mode', 're_count', 're_num_splits',
                'train_crop_mode')


def check_metadata(metadata: Any, name: str) -> None:
    """Check the types of what a weight file says about its model; `name` is the file's, for messages.

    Raises:
        WeightsError: an entry that has another type than `save_weights` writes.
    """
    if not isinstance(metadata, dict):
        raise WeightsError(f'{name} holds metadata of another program: a {type(metadata).__name__}, not an object')
    for key, what, fits in (('model', 'a name', lambda v: isinstance(v, str) and 0 < len(v) <= 200),
                            ('options', 'an object', lambda v: isinstance(v, dict)),
                            ('transform', 'an object', lambda v: v is None or isinstance(v, dict)),
                            ('classes', 'a list of names', lambda v: isinstance(v, list) and all(
                                isinstance(item, str) and len(item) <= 1000 for item in v))):
        if key in metadata and not fits(metadata[key]):
            raise WeightsError(f'{name} holds metadata of another program: {key} must be {what}, got '
                               f'{_came(metadata[key])}')


def check_options(model: str, options: Dict[str, Any], name: str) -> Dict[str, Any]:
    """A model's options as a weight file or a checkpoint's config says them, found to be harmless.

    Only what the network's class takes is allowed, with its types and within bounds, so that a file cannot reach
    timm's own arguments (`checkpoint_path`, `pretrained_cfg`, ...) or build a network without end.

    Args:
        model: timm name of a model that exists. options: for `timm.create_model`. name: the file's, for messages.

    Returns:
        The options.

    Raises:
        WeightsError: an option that the model does not have, or a value that is not allowed.
    """
    cls = typing.get_type_hints(timm.models.model_entrypoint(model)).get('return')
    if hasattr(cls, 'OPTIONS'):
        try:
            check(model, cls.OPTIONS, options)
        except (TypeError, ValueError) as error:
            raise WeightsError(f'{name}: {error}') from error
        return dict(options)
    known = _arguments(cls)
    for key, value in options.items():
        if key not in known:
            raise WeightsError(f'{name}: {model} has no option {_came(key)}; it has {some(sorted(known), 30)}')
        low, high = BOUNDS.get(key, (-LARGEST, LARGEST))
        if not _plain(value, low, high):
            raise WeightsError(f'{name}: {key} of {model} must be a number, a name, true or false, or a list of them'
                               f"{f', from {low:g} to {high:g}' if key in BOUNDS else ''}, got {_came(value)}")
    return dict(options)


def check_transform(transform: Dict[str, Any], name: str) -> Dict[str, Any]:
    """A transform for evaluation as a weight file says it, for `timm.data.create_transform`; `name` is the file's.

    Raises:
        WeightsError: an option that is not one of evaluation, or a value that is not allowed.
    """
    transform = {key: value for key, value in transform.items() if key not in _OF_TRAINING}
    for key, value in transform.items():
        if key not in _TRANSFORM:
            raise WeightsError(f'{name}: transform has no option {_came(key)}; it has {some(list(_TRANSFORM), 30)}')
        fits, what = _TRANSFORM[key]
        if not (isinstance(value, (str, list, tuple, int, float, type(None))) and fits(value)):
            raise WeightsError(f'{name}: {key} of the transform must be {what}, got {_came(value)}')
    return dict(transform)


def _arguments(cls: Any) -> Set[str]:
    """Arguments of the class of one of timm's networks and of the classes below it."""
    known = set(COMMON)
    for base in cls.__mro__ if inspect.isclass(cls) else ():
        if '__init__' in vars(base) and not base.__module__.startswith(('torch.', 'builtins')):
            known |= {key for key, parameter in inspect.signature(base.__init__).parameters.items()
                      if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    return known.difference(_NOT_OPTIONS)


def _plain(value: Any, low: float, high: float) -> bool:
    """A bool, a short name, None, a number within bounds, or at most 16 of them."""
    if isinstance(value, (list, tuple)):
        return len(value) <= 16 and all(not isinstance(v, (list, tuple)) and _plain(v, low, high) for v in value)
    if isinstance(value, str):
        return len(value) <= 64 and value.isprintable() and not set(value) & set('/\\:')
    return value is None or isinstance(value, bool) or _number(value, low, high)


def _number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _numbers(value: Any, low: float, high: float) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) in (1, 3) and all(_number(item, low, high) for item in value)
    return _number(value, low, high)


def _sizes(value: Any) -> bool:
    values: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    return 0 < len(values) <= 3 and all(type(item) is int and 1 <= item <= _SIDE for item in values)


def _came(value: Any, most: int = 60) -> str:
    """A value for messages, cut where it is long."""
    if isinstance(value, (dict, list, tuple)) and len(value) > 16:
        return f'a {type(value).__name__} of {len(value)}'
    try:
        text = ascii(value)
    except (ValueError, RecursionError):          # an integer of thousands of digits; nesting without end
        return f'a {type(value).__name__}'
    return text if len(text) <= most else f'{text[:most]}...'
