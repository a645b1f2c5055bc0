"""Which implementation of an operator runs: `auto`, or what a call, a context manager or SUBQUAD_BACKEND asks for."""
import os
from contextlib import contextmanager
from typing import Callable, Iterator, Mapping

import torch

BACKENDS = ('auto', 'portable', 'reference', 'export')


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
        backend: one of `auto`, `portable`, `reference`, `export`.

    Raises:
        ValueError: unknown name.
    """
    global _active
    previous, _active = _active, _known(backend, 'use_backend')
    try:
        yield
    finally:
        _active = previous


def exporting() -> bool:
    """True while torch.export, torch.jit.trace or the ONNX exporter records the graph."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def choose(op: str, implementations: Mapping[str, Callable], backend: str) -> Callable:
    """The implementation of `op` that `backend` stands for.

    Args:
        op: name of the operator, for messages.
        implementations: backend name -> function.
        backend: what the caller asked for; `auto` follows `use_backend` and SUBQUAD_BACKEND, then picks `export`
            while a graph is being exported and `portable` otherwise.

    Raises:
        ValueError: unknown backend.
    """
    if _known(backend, op) == 'auto':
        backend = _active
    if backend == 'auto':
        backend = 'export' if exporting() else 'portable'
    return implementations[backend]


def why_not(op: str) -> str:
    """Why `op` does not run on a Triton kernel, in a sentence.

    Raises:
        ValueError: unknown operator.
    """
    from . import __all__ as public
    operators = [name for name in public if name not in ('use_backend', 'why_not')]
    if op not in operators:
        raise ValueError(f"why_not: unknown operator {op!r}; allowed: {', '.join(operators)}")
    return f'{op} has no Triton kernel in this version: it runs on the portable PyTorch path on every device.'
