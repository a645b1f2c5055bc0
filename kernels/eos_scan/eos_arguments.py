"""Argument checks of `eos_elementwise` and `eos_matmul`."""
from typing import Any, Optional, Tuple

from torch import Tensor

from ..common import checks
from .generator import GENERATOR_FORMS, DecayGenerator
from .problem import Oscillation

CHUNKS = (16, 32, 64, 128)


def check_keys(op: str, i: Tensor, static: bool = True, **given: Tensor) -> int:
    """Check tensors (B, H, T, K), or (H, K, D) if `static`, beside the input i (B, H, T, D), and return K."""
    ranks, real = {'i': 4}, {'i': i}
    for name, x in given.items():
        ranks[name] = 3 if static and isinstance(x, Tensor) and x.ndim == 3 else 4
        real[name] = x.real if isinstance(x, Tensor) and x.is_complex() else x
    checks.tensors(op, ranks, *real, **real)
    (batch, heads, length, dim), first = i.shape, next(iter(given))
    keys = given[first].shape[1 if ranks[first] == 3 else 3]
    if keys < 1 or dim < 1:
        raise ValueError(f'{op}: i and {first} must have at least one channel, got shapes {tuple(i.shape)} and '
                         f'{tuple(given[first].shape)}')
    rows = []
    for name, x in given.items():
        static = ranks[name] == 3
        shape = (heads, keys, dim) if static else (batch, heads, length, keys)
        rows.append((name, x, shape, f"{'heads and channels' if static else 'tokens and heads'} of i, K = {keys} of "
                                     f'{first}'))
    checks.shapes(op, *rows)
    return keys


def check_log(op: str, name: str, x: Tensor, i: Tensor, channels: int, sign: bool = True) -> None:
    """Check (B, H, T, channels) or (H, channels), where `channels` may be 1, and that no step log is positive."""
    rank = 2 if isinstance(x, Tensor) and x.ndim == 2 else 4
    checks.tensors(op, {'i': 4, name: rank}, i=i, **{name: x})
    lead = i.shape[:3] if rank == 4 else i.shape[1:2]
    if x.shape[:-1] != lead or x.shape[-1] != channels and x.shape[-1] != 1:
        raise ValueError(f'{op}: {name} must have shape (B, H, T, {channels}), (B, H, T, 1), (H, {channels}) or (H, 1) '
                         f'with B, H, T = {tuple(i.shape[:3])}, got {tuple(x.shape)}')
    if sign:
        checks.step_logs(op, **{name: x})


def check_full_log(op: str, x: Tensor, i: Tensor, keys: int) -> None:
    """Check log_o: (B, H, T, K, D) or (H, K, D)."""
    rank = 3 if isinstance(x, Tensor) and x.ndim == 3 else 5
    checks.tensors(op, dict(i=4, log_o=rank), i=i, log_o=x)
    lead = i.shape[:3] if rank == 5 else i.shape[1:2]
    checks.shapes(op, ('log_o', x, (*lead, keys, i.shape[3]), 'a step log for each element of the memory'))
    checks.step_logs(op, log_o=x)


def check_theta(op: str, theta: Tensor, i: Tensor, keys: int) -> None:
    """Check (B, H, T, K), (H, K), (H, 1) or (H, K, D)."""
    if isinstance(theta, Tensor) and theta.ndim == 3:
        checks.tensors(op, dict(i=4, theta=3), i=i, theta=theta)
        checks.shapes(op, ('theta', theta, (i.shape[1], keys, i.shape[3]), 'an angle for each element of the memory'))
    else:
        check_log(op, 'theta', theta, i, keys, sign=False)


def check_generator(op: str, generator: DecayGenerator, i: Tensor, keys: int) -> None:
    if not isinstance(generator, DecayGenerator):
        raise TypeError(f'{op}: generator must be a DecayGenerator, got {type(generator).__name__}')
    z, weight, axis, form, tau = generator
    checks.one_of(op, 'generator.axis', axis, ('k', 'd'))
    checks.one_of(op, 'generator.form', form, GENERATOR_FORMS)
    checks.number(op, 'generator.tau', tau, positive=True)
    names = {'i': i, 'generator.z': z, 'generator.weight': weight}
    checks.tensors(op, {'i': 4, 'generator.z': 4, 'generator.weight': 3}, **names)
    heads, dim = i.shape[1], i.shape[3]
    channels = keys if axis == 'k' else dim
    checks.shapes(op, ('generator.z', z, (*i.shape[:3], channels), f'tokens and heads of i, axis {axis!r} of memory'))
    # Sizes may be symbolic, which `in` does not compare.
    if not (weight.shape[0] == heads and all(n == 1 or n == size for n, size in zip(weight.shape[1:], (keys, dim)))):
        raise ValueError(f'{op}: generator.weight must have shape ({heads}, {keys} or 1, {dim} or 1), got '
                         f'{tuple(weight.shape)}')
    if form == 'exponential':
        for name in ('generator.z', 'generator.weight'):
            checks.not_negative(op, name, names[name], "with form='exponential'")


def check_oscillation(op: str, oscillation: Oscillation, i: Tensor, e: Tensor, s: Tensor, keys: int) -> None:
    log_o_k, log_o_d, log_o, theta, generator = oscillation
    if log_o_k is not None:
        check_log(op, 'log_o_k', log_o_k, i, keys)
    if log_o_d is not None:
        check_log(op, 'log_o_d', log_o_d, i, i.shape[3])
    if log_o is not None:
        check_full_log(op, log_o, i, keys)
    if generator is not None:
        check_generator(op, generator, i, keys)
    if log_o is not None and generator is not None:
        raise ValueError(f'{op}: give either log_o or generator, not both')
    if theta is not None:
        check_theta(op, theta, i, keys)
        if generator is not None or log_o is not None and log_o.ndim == 5:
            raise ValueError(f'{op}: theta needs a decay of rank one, or log_o of shape (H, K, D)')
    elif e.is_complex() or s.is_complex():
        raise TypeError(f'{op}: complex e or s need theta')


def check_run(op: str, i: Tensor, keys: int, scale: float, reverse: bool, bidirectional: bool,
              state: Optional[Tensor], output_state: bool, chunk: int, complex_state: bool = False) -> str:
    """Check the other arguments, and return the direction: 'forward', 'reverse' or 'both'."""
    checks.number(op, 'scale', scale)
    checks.flags(op, reverse=reverse, bidirectional=bidirectional, output_state=output_state)
    if reverse and bidirectional:
        raise ValueError(f'{op}: reverse and bidirectional exclude each other')
    if bidirectional and (state is not None or output_state):
        raise ValueError(f'{op}: bidirectional has no state at one end: initial_state and output_state need one '
                         'direction')
    if type(chunk) is not int or chunk not in CHUNKS:                        # 64.0 equals 64, but is no size
        kind = ValueError if type(chunk) is int else TypeError
        raise kind(f"{op}: chunk must be one of the integers {', '.join(map(str, CHUNKS))}, got {chunk!r}")
    if output_state:
        checks.fits(op, 'the memory', i, (*i.shape[:2], keys, i.shape[3]))
    if state is not None:
        real = state.real if isinstance(state, Tensor) and state.is_complex() else state
        checks.tensors(op, dict(i=4, initial_state=4), i=i, initial_state=real)
        checks.shapes(op, ('initial_state', state, (*i.shape[:2], keys, i.shape[3]), 'the memory (B, H, K, D)'))
        if state.is_complex() and not complex_state:
            raise TypeError(f'{op}: a complex initial_state needs theta')
    return 'both' if bidirectional else 'reverse' if reverse else 'forward'


def tensors_of(*given: Any) -> Tuple[Tensor, ...]:
    """Return those of the arguments that are tensors, and the tensors of a `DecayGenerator`, for `dispatch.choose`."""
    found = []
    for x in given:
        if isinstance(x, DecayGenerator):
            found += [x.z, x.weight]
        elif isinstance(x, Tensor):
            found.append(x)
    return tuple(found)
