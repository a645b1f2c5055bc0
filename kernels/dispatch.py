"""Choose the implementation of an operator: by the call, a context manager, SUBQUAD_BACKEND, or the tensors."""
import importlib.util
import os
from contextlib import contextmanager
from functools import lru_cache
from typing import Callable, Dict, Iterator, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .common.checks import exporting, forward_mode, transforming
from .common.launch import interpreted
from .native import INSTRUCTION_SET
from .native import why_not as why_not_native

BACKENDS = ('auto', 'triton', 'native', 'portable', 'reference', 'export')
# Why Triton cannot run an operator: a function of its tensors, or a sentence if the operator has no kernel.
Objection = Union[None, str, Callable[..., Optional[str]]]


class Operator(NamedTuple):
    """The declaration of an operator.

    Attributes:
        implementations: functions by backend. All are called with the same arguments.
        plain: whether `portable` is PyTorch operations, as `reference` and `export` are: these have
            all derivatives. Others have a gradient written by hand, and no forward mode.
        native_gradient: whether `native` has a gradient.
        objection: returns why the Triton kernels cannot run on the tensors that the operator is
            called with, or None; a sentence if there are no kernels.
    """
    implementations: Dict[str, Callable]
    plain: bool = False
    native_gradient: bool = False
    objection: Objection = None


# Filled by the operators' modules, which `kernels/__init__.py` lists.
OPERATORS: Dict[str, Operator] = {}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Look for Triton without importing it: no module imports it before a kernel runs.
_TRITON_INSTALLED = importlib.util.find_spec('triton') is not None


def _known(backend: str, source: str) -> str:
    """Check a backend for all operators, or for the operator `source`, which may have further ones."""
    own = OPERATORS[source].implementations if source in OPERATORS else {}
    allowed = list(dict.fromkeys((*BACKENDS, *own)))
    if backend not in allowed:
        raise ValueError(f"{source}: unknown backend {backend!r}; allowed: {', '.join(allowed)}")
    return backend


# A module global rather than a ContextVar: torch.compile can guard on it.
_active = _known(os.environ.get('SUBQUAD_BACKEND', 'auto'), 'SUBQUAD_BACKEND')


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Use this backend inside the block for all calls with `backend='auto'`, the default and what the models use.

    Args:
        backend: one of `auto`, `triton`, `native`, `portable`, `reference`, `export`.

    Raises:
        ValueError: the name is unknown.
    """
    global _active
    previous, _active = _active, _known(backend, 'use_backend')
    try:
        yield
    finally:
        _active = previous


def choose(op: str, backend: str, *tensors: Tensor) -> Callable:
    """Return the implementation of `op` for `backend`.

    Args:
        op: the operator's name.
        backend: the caller's choice, as for `chosen_backend`.
        tensors: the operator's arguments.

    Raises:
        ValueError: the backend is unknown, it is Triton and Triton cannot run these tensors, or it would drop the
            tangents of forward-mode differentiation.
    """
    # First the common case: neither a graph nor a transform.
    if backend == _active == 'auto' and (tensors[0].is_cpu or tensors[0].is_cuda) and not (
            torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing()
            or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()):
        implementations = OPERATORS[op].implementations
        fastest = 'native' if tensors[0].is_cpu else 'triton'
        objection = native_objection if tensors[0].is_cpu else _objection
        return implementations[fastest if fastest in implementations and not objection(op, *tensors) else 'portable']
    backend = chosen_backend(op, backend, *tensors)
    if backend == 'triton':
        objection = _objection(op, *tensors)
        if objection:
            raise ValueError(f"{op}: backend 'triton' cannot run: {objection}")
    if backend == 'native':
        objection = native_objection(op, *tensors)
        if objection:
            raise ValueError(f"{op}: backend 'native' cannot run: {objection}")
    plain = backend in ('reference', 'export') or backend == 'portable' and OPERATORS[op].plain
    if forward_mode() and not plain:
        raise ValueError(f"{op}: backend {backend!r} has no forward-mode derivatives (jvp, jacfwd, forward_ad): use "
                         "backend='auto' or use_backend('export')")
    return OPERATORS[op].implementations[backend]


def chosen_backend(op: str, backend: str, *tensors: Tensor) -> str:
    """Return the name of the backend that `op` would run on.

    Args:
        op: the operator's name.
        backend: the caller's choice. `auto` follows `use_backend` and SUBQUAD_BACKEND. Then it picks `export` while a
            graph is exported, and inside transforms (`checks.transforming`) if `portable` has gradients of its own;
            otherwise `triton` if `why_not` returns None, `native` if the operator has it and it can run these tensors,
            and `portable`.
        tensors: the operator's arguments.

    Raises:
        ValueError: the backend is unknown.
    """
    if _known(backend, op) == 'auto':
        backend = _active
    if backend == 'auto':
        if exporting() or transforming() and not OPERATORS[op].plain:
            return 'export'
        on_gpu = not transforming() and tensors[0].device.type == 'cuda' and why_not(op, *tensors) is None
        native = not transforming() and native_objection(op, *tensors) is None
        backend = 'triton' if on_gpu else 'native' if native else 'portable'
    return backend


def native_objection(op: str, *tensors: Tensor) -> Optional[str]:
    """Return in one clause why no native operator can run on tensors, or None."""
    operator = OPERATORS[op]
    if 'native' not in operator.implementations:
        return 'it has no native operator.'
    if INSTRUCTION_SET is None:
        return why_not_native()
    gradient = torch.is_grad_enabled() and not operator.native_gradient
    for x in tensors:
        if not x.is_cpu:
            return f'the native operators run on a CPU, and an argument is on {x.device}.'
        if x.dtype not in (torch.float32, torch.bfloat16):
            return f'the native operators take float32 and bfloat16, and an argument is {x.dtype}.'
        if gradient and x.requires_grad:
            return 'the native operator has no gradient.'
    return None


def why_not(op: str, *tensors: Tensor) -> Optional[str]:
    """Explain in one sentence why Triton cannot run `op` on these tensors; None if it can.

    A forced backend (`use_backend`, SUBQUAD_BACKEND) and export are not considered.

    Args:
        op: the operator's name.
        tensors: its arguments, in order. Without them, only reasons that hold for all arguments are considered.

    Raises:
        ValueError: the operator is unknown.
    """
    if op not in OPERATORS:
        raise ValueError(f"why_not: unknown operator {op!r}; allowed: {', '.join(sorted(OPERATORS))}")
    has_kernel = _TRITON_INSTALLED and not isinstance(OPERATORS[op].objection, str)
    if not tensors and has_kernel and not torch.cuda.is_available():
        return f'{op} does not run on Triton: torch finds no GPU here.'
    if has_kernel and tensors and tensors[0].device.type != 'cuda':
        return (f'{op} does not run on Triton: its arguments are on {tensors[0].device}, and the Triton '
                'kernels run on a GPU.')
    objection = _objection(op, *tensors)
    return objection and f'{op} does not run on Triton: {objection}'


@lru_cache(maxsize=64)                  # asking PyTorch takes longer than the rest of a choice
def _capability(device: torch.device) -> Tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _objection(op: str, *tensors: Tensor) -> Optional[str]:
    """Return in one clause why no Triton kernel can run, even if the caller asks for it; None if one can."""
    own = OPERATORS[op].objection
    if isinstance(own, str):
        return own
    if not _TRITON_INSTALLED:
        return 'Triton is not installed (pip install triton, on Linux).'
    if not tensors:
        return None
    first = tensors[0]
    if first.device.type == 'cuda' and torch.version.hip is None:
        known = torch.cuda.get_device_capability if torch.compiler.is_compiling() else _capability
        if known(first.device) < (7, 0):
            return f'Triton needs compute capability 7.0, and {torch.cuda.get_device_name(first.device)} has less.'
    elif first.device.type not in ('cuda', 'meta') and not interpreted():       # meta: only shapes are computed
        return f'the arguments are on {first.device}, and Triton runs on a GPU or with TRITON_INTERPRET=1.'
    if first.dtype not in _DTYPES:
        return f'the kernels take float32, float16 and bfloat16, and the arguments are {first.dtype}.'
    return own(*tensors) if own is not None else None
