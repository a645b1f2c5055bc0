"""Options of the networks: one table for each family, and one function that checks them all.

The table `OPTIONS` of a family names every option that a caller or a weight file may set, with its type and its bounds.
The bounds are wide. They keep a typo or a damaged file from requesting a network that no machine can hold.
"""
from difflib import get_close_matches
from typing import Any, Callable, Mapping, NamedTuple

MIN_SIZE = 32


class Option(NamedTuple):
    """The values that one option accepts.

    Attributes:
        allowed: the accepted values in words, which follow "must be" in error messages.
        accepts: returns True for an accepted value.
    """
    allowed: str
    accepts: Callable[[Any], bool]


Options = Mapping[str, Option]


def integer(least: int, most: int) -> Option:
    """An integer from `least` to `most`. True and False are not accepted."""
    return Option(f'an integer from {least} to {most}', lambda value: _is_integer(value) and least <= value <= most)


def number(least: float, most: float) -> Option:
    """A number from `least` to `most`."""
    return Option(f'a number from {least} to {most}', lambda value: _is_number(value) and least <= value <= most)


def rate() -> Option:
    """A probability below 1, such as a dropout rate."""
    return Option('a number from 0 to below 1', lambda value: _is_number(value) and 0 <= value < 1)


def flag() -> Option:
    """True or False. Other values that Python treats as true or false, such as 'no', are not accepted."""
    return Option('True or False', lambda value: isinstance(value, bool))


def one_of(*values: Any) -> Option:
    """One of a few names or numbers."""
    allowed = ', '.join(map(repr, values))

    def accepts(value: Any) -> bool:
        return any(isinstance(value, type(choice)) and value == choice for choice in values)

    return Option(f'one of {allowed}' if len(values) > 1 else allowed, accepts)


def or_none(option: Option) -> Option:
    """A value that `option` accepts, or None."""
    return Option(f'{option.allowed}, or None', lambda value: value is None or option.accepts(value))


def each_stage(option: Option, stages: int = 4) -> Option:
    """A list or tuple with one value for each stage."""
    return Option(
        f'one value for each of {stages} stages, each {option.allowed}',
        lambda value: _is_list(value, stages) and all(map(option.accepts, value)),
    )


def one_or_each_stage(option: Option, stages: int = 4) -> Option:
    """One name for all stages, or a list or tuple with one name for each stage."""
    every = each_stage(option, stages)
    return Option(
        f'{option.allowed}, or a list of {stages} of them, one for each stage',
        lambda value: option.accepts(value) or every.accepts(value),
    )


def image_size(least: int = MIN_SIZE) -> Option:
    """One integer for a square image, or a pair (height, width)."""
    side = integer(least, 1 << 20)
    return Option(
        f'an integer of at least {least} or a pair (height, width) of them',
        lambda value: side.accepts(value) or _is_list(value, 2) and all(map(side.accepts, value)),
    )


def check(owner: str, options: Options, given: Mapping[str, Any]) -> None:
    """Check the names and values of options.

    Args:
        owner: name of the model or module, for error messages.
        options: the options that `owner` has, by name.
        given: the values to check, by option name.

    Raises:
        TypeError: a name is not an option.
        ValueError: an option does not accept its value.
    """
    for name, value in given.items():
        if name not in options:
            raise TypeError(_unknown_name(owner, options, name))
        if not options[name].accepts(value):
            raise ValueError(f'{name} must be {options[name].allowed}, got {short_repr(value)}')


def _unknown_name(owner: str, options: Options, name: str) -> str:
    """The error message for a name that is not an option."""
    near = get_close_matches(str(name), options, 1)
    hint = f'; did you mean {near[0]!r}?' if near else f"; its options are {', '.join(options)}"
    return f'{owner} got an unexpected keyword argument {name!r}{hint}'


# Options that all families of image backbones have.
COMMON: Options = {
    'num_classes': integer(0, 10_000_000),
    'in_chans': integer(1, 65_536),
    'img_size': or_none(image_size()),
    'drop_rate': rate(),
    'drop_path_rate': rate(),
}


def short_repr(value: Any) -> str:
    """The repr of a value, cut to 120 characters, because a value may be a list of thousands."""
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + '...'


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == length
