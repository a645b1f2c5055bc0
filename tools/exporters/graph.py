"""Record the graph of a subject with torch.export, check it for what other runtimes cannot run, and hide what
converters print."""
import contextlib
import logging
import os
import sys
import warnings
from typing import AbstractSet, Dict, Iterator

import torch

from ..common.cli import UserError, one_line
from .subject import Subject

# Operators that only move elements; converters fold a chain of them, so the ranks in between do not matter.
MOVES = ('view', 'reshape', 'unsqueeze', 'unflatten', 'squeeze', 'permute', 'transpose', 'clone', '_unsafe_view',
         'expand', 'alias', 'select', 'slice', 'cat')
_REFUSED = ('linalg', 'im2col', 'while_loop', 'scan', 'cond')
LARGEST_BATCH = 64
LARGEST_RANK = 4                # of tensors that runtimes compute with


def export_program(subject: Subject, dynamic: AbstractSet[str] = frozenset(), batch: int = 2
                   ) -> torch.export.ExportedProgram:
    """Record the graph of a subject, not decomposed, and check it.

    `dynamic` has 'batch' and 'hw' for the dimensions that the graph leaves open; `batch` is that of the example.
    """
    if 'hw' in dynamic and isinstance(subject.sizes, str):
        raise UserError(subject.sizes)
    dims: Dict[int, object] = {}
    if 'batch' in dynamic:
        dims[0] = torch.export.Dim('batch', min=1, max=LARGEST_BATCH)
    if 'hw' in dynamic:
        smallest, step, largest = subject.sizes
        for axis, name in ((2, 'height'), (3, 'width')):                 # in steps
            dims[axis] = (step * torch.export.Dim(name, min=max(2, smallest // step), max=largest // step)
                          if step > 1 else torch.export.Dim(name, min=smallest, max=largest))
    # An example of size 1 would fix the dimension, and equal sides would be taken for one.
    size = subject.size
    if 'hw' in dynamic:
        height, width = (max(3 * step, -(-side // step) * step) for side in size)
        size = (height, width + step if width == height else width)
    example = torch.zeros(batch if 'batch' in dynamic else 1, subject.in_chans, *size)
    try:
        with torch.no_grad():
            program = torch.export.export(subject.module, (example,), dynamic_shapes=(dims,) if dims else None)
    except Exception as error:             # torch.export raises exceptions of many kinds
        raise UserError(f'torch.export cannot record {subject.name}: {one_line(error)[:500]}') from error
    check_program(program)
    return program


def check_program(program: torch.export.ExportedProgram) -> None:
    """Refuse operators that other runtimes do not have."""
    bad = list(dict.fromkeys(_refused(program)))
    if bad:
        raise UserError('the exported graph holds operators that other runtimes cannot run: ' + ', '.join(bad[:5]))


def _refused(program: torch.export.ExportedProgram) -> Iterator[str]:
    for node in program.run_decompositions({}).graph.nodes:
        if node.op != 'call_function':
            continue
        name = str(node.target)
        if not name.startswith(('aten.', '<built-in function', 'prims.', 'sym_', 'torch.sym_', 'math.')) or any(
                word in name for word in _REFUSED):
            yield name
        value = node.meta.get('val')
        rank = value.ndim if isinstance(value, torch.Tensor) else 0
        if rank and value.is_complex():
            yield f'{name} on complex numbers'
        if rank > LARGEST_RANK and name.removeprefix('aten.').split('.')[0] not in MOVES:
            yield f'{name} on {rank} dimensions'


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard standard output, standard error and warnings of this process, including those of C++ code."""
    before = logging.root.manager.disable
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(stream) for stream in (1, 2)]
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, 'w') as nothing, warnings.catch_warnings(), \
                contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            warnings.simplefilter('ignore')
            for stream in (1, 2):
                os.dup2(nothing.fileno(), stream)
            yield
    finally:
        for stream, copy in zip((1, 2), saved):
            os.dup2(copy, stream)
            os.close(copy)
        logging.disable(before)
