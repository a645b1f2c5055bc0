"""Which implementation of an operator runs: `auto`, or what a call, a context manager or SUBQUAD_BACKEND asks for."""
import importlib.util
import os
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, Mapping, Optional, Union

import torch
from torch import Tensor

from .common.launch import interpreted
from .common.tracing import exporting

BACKENDS = ('auto', 'triton', 'portable', 'reference', 'export')
# Objections to Triton, by operator: a function of the operator's tensors, or one sentence where there is no kernel.
Objection = Union[None, str, Callable[..., Optional[str]]]
OPERATORS: Dict[str, Objection] = {}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Found, not imported: nothing here imports Triton before a kernel runs.
_TRITON_INSTALLED = importlib.util.find_spec('triton') is not None


def _known(backend: str, source: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"{source}: unknown backend {backend!r}; allowed: {', '.join(BACKENDS)}")
    return backend


# A module global rather than a ContextVar: torch.compile can guard on it.
_active = _known(os.environ.get('SUBQUAD_BACKEND', 'auto'), 'SUBQUAD_BACKEND')


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block, calls that say `backend='auto'` (all of the models' calls) take this backend.

    Args:
        backend: one of `auto`, `triton`, `portable`, `reference`, `export`.

    Raises:
        ValueError: unknown name.
    """
    global _active
    previous, _active = _active, _known(backend, 'use_backend')
    try:
        yield
    finally:
        _active = previous


def register(op: str, implementations: Mapping[str, Callable], objection: Objection = None) -> Dict[str, Callable]:
    """Make an operator known to `why_not`, and return its table of implementations.

    Args:
        op: the operator's name.
        implementations: backend name -> function.
        objection: returns why the operator's Triton kernels cannot take the tensors it is called with, or None; a
            sentence where the operator has no Triton kernel.
    """
    OPERATORS[op] = objection
    return dict(implementations)


def choose(op: str, implementations: Mapping[str, Callable], backend: str, *tensors: Tensor) -> Callable:
    """The implementation of `op` that `backend` stands for.

    Args:
        op: name of the operator, for messages.
        implementations: backend name -> function.
        backend: what the caller asked for; `auto` follows `use_backend` and SUBQUAD_BACKEND, then picks `export`
            while a graph is being exported, `triton` where `why_not` has no objection, and `portable` otherwise.
        tensors: the operator's arguments.

    Raises:
        ValueError: unknown backend, or Triton asked for where it can't run.
    """
    if _known(backend, op) == 'auto':
        backend = _active
    if backend == 'auto':
        on_gpu = tensors[0].device.type == 'cuda' and why_not(op, *tensors) is None
        backend = 'export' if exporting() else 'triton' if on_gpu else 'portable'
    elif backend == 'triton':
        objection = _objection(op, *tensors)
        if objection:
            raise ValueError(f"{op}: backend 'triton' can't run: {objection}")
    return implementations[backend]


def why_not(op: str, *tensors: Tensor) -> Optional[str]:
    """Why `auto` does not run `op` on a Triton kernel, in a sentence; None where it does.

    Args:
        op: name of the operator.
        tensors: its arguments, in order; without any, only what holds for all arguments is considered.

    Raises:
        ValueError: unknown operator.
    """
    if op not in OPERATORS:
        raise ValueError(f"why_not: unknown operator {op!r}; allowed: {', '.join(sorted(OPERATORS))}")
    has_kernel = _TRITON_INSTALLED and not isinstance(OPERATORS[op], str)
    if not tensors and has_kernel and not torch.cuda.is_available():
        return f'{op} runs on the portable PyTorch path: torch finds no GPU here.'
    if has_kernel and tensors and tensors[0].device.type != 'cuda':
        return (f'{op} runs on the portable PyTorch path: its arguments are on {tensors[0].device}, and the Triton '
                'kernels run on a GPU.')
    objection = _objection(op, *tensors)
    return objection and f'{op} runs on the portable PyTorch path: {objection}'


def _objection(op: str, *tensors: Tensor) -> Optional[str]:
    """What makes a Triton kernel impossible, whoever asks for it, in a clause; None where it can run."""
    own = OPERATORS[op]
    if isinstance(own, str):
        return own
    if not _TRITON_INSTALLED:
        return 'Triton is not installed (pip install triton, on Linux).'
    if not tensors:
        return None
    first = tensors[0]
    if first.device.type == 'cuda' and torch.version.hip is None:
        if torch.cuda.get_device_capability(first.device) < (7, 0):
            return f'Triton needs compute capability 7.0, and {torch.cuda.get_device_name(first.device)} has less.'
    elif first.device.type != 'cuda' and not interpreted():
        return f'the arguments are on {first.device}, and Triton runs on a GPU or with TRITON_INTERPRET=1.'
    if first.dtype not in _DTYPES:
        return f'the kernels take float32, float16 and bfloat16, and the arguments are {first.dtype}.'
    return own(*tensors) if own is not None else None
