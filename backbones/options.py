"""Options of the networks: constructor arguments with bounds, which stand in their annotations.

    class Network(nn.Module):
        @checked
        def __init__(self, dim: Annotated[int, integer(1, 65_536)] = 64, gated: Flag = True):

The signature holds the type, the bounds and the default of an option, and the docstring says what it means. A weight
file may set the same options. The bounds are wide. They keep a typo or a damaged file from requesting a network that no
machine can hold.
"""
from difflib import get_close_matches
from functools import lru_cache, wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Callable, Dict, Mapping, NamedTuple, Tuple, Union

MIN_SIZE = 32


class Option(NamedTuple):
    """The values that one option accepts.

    Attributes:
        allowed: the accepted values in words, which follow "must be" in error messages.
        accepts: returns True for an accepted value.
        default: the default of the argument; `Parameter.empty` for none.
    """
    allowed: str
    accepts: Callable[[Any], bool]
    default: Any = Parameter.empty

    def __repr__(self) -> str:
        return f'<{self.allowed}>'                       # short in signatures


Options = Mapping[str, Option]


def integer(least: int, most: int) -> Option:
    """An integer from `least` to `most`. True and False are not accepted."""
    return Option(f'an integer from {least} to {most}', lambda value: _is(int, value) and least <= value <= most)


def number(least: float, most: float) -> Option:
    """A number from `least` to `most`."""
    return Option(f'a number from {least} to {most}', lambda value: _is((int, float), value) and least <= value <= most)


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


# Options of several networks.
FLAG = Option('True or False', lambda value: isinstance(value, bool))         # no other value, such as 'no'
Flag = Annotated[bool, FLAG]
NumClasses = Annotated[int, integer(0, 10_000_000)]
InChans = Annotated[int, integer(1, 65_536)]
Rate = Annotated[float, Option('a number from 0 to below 1', lambda value: _is((int, float), value) and 0 <= value < 1)]
ImageSize = Annotated[Union[None, int, Tuple[int, int]], or_none(image_size())]


@lru_cache(maxsize=None)
def known_options(cls: type, without: Tuple[str, ...] = ()) -> Options:
    """Return the options of a class by name.

    They are the arguments with bounds of its constructor and of those of its base classes, and those that the class
    passes on to another one, which its attribute `PASSED_ON` holds.

    Args:
        cls: any class.
        without: names of options to leave out.
    """
    found: Dict[str, Option] = {}
    for base in reversed(cls.__mro__):
        found.update(vars(base).get('PASSED_ON', {}))
        for name, parameter in signature(base.__init__).parameters.items() if '__init__' in vars(base) else ():
            for option in getattr(parameter.annotation, '__metadata__', ()):
                if isinstance(option, Option):
                    found[name] = option._replace(default=parameter.default)
    return {name: option for name, option in found.items() if name not in without}


def checked(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate a constructor to check its arguments against the options of the class.

    Raises:
        TypeError: a keyword is no argument; the message names the nearest option.
        ValueError: an option does not accept its value.
    """
    names = list(signature(init).parameters)

    @wraps(init)
    def check_and_init(self: Any, *args: Any, **kwargs: Any) -> None:
        options = known_options(type(self))
        given = {**dict(zip(names[1:], args)), **kwargs}
        others = {'device', 'dtype', *names}
        check(type(self).__name__, options, {k: v for k, v in given.items() if k in options or k not in others})
        init(self, *args, **kwargs)

    return check_and_init


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
            near = get_close_matches(str(name), options, 1, 0.75)
            hint = f'did you mean {near[0]!r}?' if near else f"its options are {', '.join(options)}"
            raise TypeError(f'{owner} got an unexpected keyword argument {name!r}; {hint}')
        if not options[name].accepts(value):
            text = repr(value)
            text = text if len(text) <= 120 else text[:120] + '...'             # a list may have thousands of items
            raise ValueError(f'{name} must be {options[name].allowed}, got {text}')


def _is(kind: Union[type, Tuple[type, ...]], value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == length
