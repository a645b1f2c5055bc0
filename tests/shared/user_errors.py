"""Messages of the errors that the tools raise for a user."""
import pytest

from subquad.tools.common.cli import UserError


def user_error(call, *words, match=None, kind=UserError):
    """Return the message of the error that call() raises.

    Args:
        call: function without arguments.
        words: texts that the message must contain.
        match: regular expression that it must match.
        kind: class of the error; `run` prints those of libraries, too.
    """
    with pytest.raises(kind, match=match) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert '\n' not in message
    return message


def command_error(main, arguments, *words, match=None, kind=UserError):
    """Return the message of the error that a command raises for these arguments; see `user_error`."""
    return user_error(lambda: main([str(argument) for argument in arguments]), *words, match=match, kind=kind)
