"""Options of networks: one table for each family, and one check for all of them.

A family's `OPTIONS` names every option that a caller or a file may set, with its type and its bounds. Bounds are wide:
they keep a slip or a damaged file from asking for a network that no machine holds, and no sensible network is beyond
them.
"""
from difflib import get_close_matches
from typing import Any, Callable, Mapping, NamedTuple

MIN_SIZE = 32


class Option(NamedTuple):
    """What one option may be.

    allowed: in words, for messages, after "must be". accepts: whether a value is allowed.
    """
    allowed: str
    accepts: Callable[[Any], bool]


Options = Mapping[str, Option]


def integer(least: int, most: int) -> Option:
    """An integer from `least` to `most`. True and False are none."""
    return Option(f'an integer from {least} to {most}', lambda value: _is_integer(value) and least <= value <= most)


def number(least: float, most: float) -> Option:
    """A number from `least` to `most`."""
    return Option(f'a number from {least} to {most}', lambda value: _is_number(value) and least <= value <= most)


def rate() -> Option:
    """A probability below 1, as of dropout and stochastic depth."""
    return Option('a number from 0 to below 1', lambda value: _is_number(value) and 0 <= value < 1)


def flag() -> Option:
    """True or False, and not what Python takes for them, such as 'no'."""
    return Option('True or False', lambda value: isinstance(value, bool))


def one_of(*values: Any) -> Option:
    """One of some names or numbers."""
    allowed = ', '.join(map(repr, values))
    return Option(f'one of {allowed}' if len(values) > 1 else allowed, lambda value: any(
        isinstance(value, type(choice)) and value == choice for choice in values))


def or_none(option: Option) -> Option:
    """What `option` allows, or None."""
    return Option(f'{option.allowed} or None', lambda value: value is None or option.accepts(value))


def each_stage(option: Option, stages: int = 4) -> Option:
    """A list or tuple with a value for each stage."""
    return Option(f'one value for each of {stages} stages, each {option.allowed}',
                  lambda value: _is_list(value, stages) and all(map(option.accepts, value)))


def one_or_each_stage(option: Option, stages: int = 4) -> Option:
    """A name for all stages, or a list or tuple with one for each."""
    every = each_stage(option, stages)
    return Option(f'{option.allowed}, one name or one for each of {stages} stages',
                  lambda value: option.accepts(value) or every.accepts(value))


def image_size(least: int = MIN_SIZE) -> Option:
    """One integer for a square, or height and width."""
    side = integer(least, 1 << 20)
    return Option(f'integers of at least {least}, one for a square image or two for height and width',
                  lambda value: side.accepts(value) or _is_list(value, 2) and all(map(side.accepts, value)))


def check(owner: str, options: Options, given: Mapping[str, Any]) -> None:
    """Every given value is what its option allows.

    Args:
        owner: whose options these are, for messages.
        options: by name.
        given: values by the options' names.

    Raises:
        TypeError: a name that is not an option.
        ValueError: a value that its option does not allow.
    """
    for name, value in given.items():
        if name not in options:
            near = get_close_matches(str(name), options, 1)
            hint = f'; did you mean {near[0]!r}?' if near else f"; its options are {', '.join(options)}"
            raise TypeError(f'{owner} got an unexpected keyword argument {name!r}{hint}')
        if not options[name].accepts(value):
            raise ValueError(f'{name} must be {options[name].allowed}, got {shown(value)}')


# Options that all families of images have.
COMMON: Options = {
    'num_classes': integer(0, 10_000_000), 'in_chans': integer(1, 65_536), 'img_size': or_none(image_size()),
    'drop_rate': rate(), 'drop_path_rate': rate()}


def shown(value: Any) -> str:
    """A value in a message, cut where it is long: what comes may be a list of thousands."""
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + '...'


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == length
