"""ExecuTorch (.pte): programs whose layers run in XNNPACK.

A file has two methods: `forward` maps images to the outputs, and `metadata`, without arguments, returns JSON text.
"""
import contextlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import Tensor

from ..common.cli import UserError, one_line, quiet, shown
from .delegation import Delegation, delegation, highest_rank, multiply_adds, remove_copies
from .file_metadata import dumps
from .formats import Conversion, Options
from .graph import LARGEST_RANK, export_program
from .subject import Subject
from .xnnpack_forms import fold_constants, halved, rewrite

# How often the thread pool, which all loaded programs share, has been replaced.
_pools = 0


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write a .pte file.

    fp16 computes with float16 weights and values; int8 quantizes the inputs and weights of convolutions and linear
    layers, with one scale for each output channel.

    Raises:
        UserError: The graph cannot be recorded, a size is dynamic that must be fixed, or int8 has no calibration.
    """
    if 'hw' in options.dynamic:
        raise UserError('ExecuTorch files have a fixed image size: XNNPACK cannot slice or reshape maps of unknown '
                        'height and width')
    with _silent():
        program, found = _lowered(_program(subject, options), dumps(subject.metadata))
        path.write_bytes(program.buffer)
    return Conversion(found.operators, found.calls, found.macs)


def _program(subject: Subject, options: Options) -> torch.export.ExportedProgram:
    """Return the graph in the precision that was asked for, with operators that XNNPACK takes."""
    if options.precision == 'int8':
        from .quantizing import quantized
        return rewrite(quantized(fold_constants(export_program(subject, options.dynamic)), options.calibration))
    program = rewrite(export_program(subject, options.dynamic))
    return halved(program) if options.precision == 'fp16' else program


def _lowered(program: torch.export.ExportedProgram, metadata: str) -> Tuple[Any, Delegation]:
    """Return the ExecuTorch program, and what XNNPACK runs of it."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass
    from executorch.exir.program._program import lift_constant_tensor_pass
    macs, ranks = [], []

    class Prepare(ExportedProgramPassBase):
        """Remove copies and compute constants again, then count; this runs before the partitioning."""

        def call(self, exported_program: torch.export.ExportedProgram) -> ExportedProgramPassResult:
            remove_copies(exported_program.graph)
            # Numbers of the graph have become tensors, which the constant propagation sees only as inputs.
            folded = constant_prop_pass(lift_constant_tensor_pass(exported_program), _skip_dim_order=False)
            macs.append(multiply_adds(folded.graph))
            ranks.append(highest_rank(folded.graph))
            return ExportedProgramPassResult(folded, True)

    with _values_of_copies():
        edge = to_edge_transform_and_lower(program, transform_passes=[Prepare()], partitioner=[XnnpackPartitioner()],
                                           constant_methods={'metadata': metadata})
    if ranks[0] > LARGEST_RANK:
        raise UserError(f'the graph holds a tensor of {ranks[0]} dimensions; ExecuTorch files here have at most '
                        f'{LARGEST_RANK}, which all delegates take')
    found = delegation(macs[0], edge.exported_program().graph)
    return edge.to_executorch(), found


@contextlib.contextmanager
def _values_of_copies() -> Iterator[None]:
    """Give copies that ExecuTorch inserts for channels-last operators the shape of what they copy.

    Version 1.5.1 looks for it, and does not find it, where a quantized value that has been copied leaves the part of
    the graph that XNNPACK runs, as in PPMA.
    """
    from executorch.backends.xnnpack._passes.channels_last_tagged_reshape_pass import ChannelsLastTaggedReshapePass
    create = ChannelsLastTaggedReshapePass.create_call_function_node

    def create_with_value(self, graph_module, target, args, memory_format=None):
        node = create(self, graph_module, target, args, memory_format)
        node.meta['val'] = args[0].meta['val']
        return node

    ChannelsLastTaggedReshapePass.create_call_function_node = create_with_value
    try:
        yield
    finally:
        ChannelsLastTaggedReshapePass.create_call_function_node = create


def load(path: Path, threads: int = 1) -> Callable[[Tensor], List[Tensor]]:
    """Return a function that runs a .pte file on images (B, C, H, W), float32: -> [tensor of each output].

    All programs of a process share one pool of threads. A call sets it to the function's number of threads.

    Raises:
        UserError: The file cannot be read. The function raises it for images that the file does not take.
    """
    program = _Program(path)
    expected = program.metadata()['input']
    program.prepare(threads)

    def run(images: Tensor) -> List[Tensor]:
        _check(images, expected, program.largest_batch)
        program.prepare(threads)
        try:
            return list(program.forward.execute((images.contiguous(),)))
        except RuntimeError as error:
            raise UserError(f'ExecuTorch cannot run {shown(path)}: {one_line(error)}') from error
    return run


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata of a .pte file.

    Raises:
        UserError: The file cannot be read or holds no metadata.
    """
    return _Program(path).metadata()


class _Program:
    """A .pte file in memory.

    Attributes:
        forward: the loaded method.
        largest_batch: number of images that the method takes at most.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f'cannot read {shown(path)} ({error.strerror or error})') from error
        if self.content[4:8] != b'ET12':              # the runtime aborts the process on some other files
            raise UserError(f'{shown(path)} is not an ExecuTorch program')
        self.pool = -1
        self.forward: Any = None
        self.largest_batch = 0

    def _load(self) -> Any:
        with _silent():
            from executorch.runtime import Runtime
            try:
                return Runtime.get().load_program(self.content)
            except RuntimeError as error:
                raise UserError(f'{shown(self.path)} is not a whole ExecuTorch program: {one_line(error)}') from error

    def metadata(self) -> Dict[str, Any]:
        program = self._load()
        if 'metadata' not in program.method_names:
            raise UserError(f'{shown(self.path)} has no metadata of subquad')
        with _silent():
            try:
                return json.loads(program.load_method('metadata').execute(())[0])
            except (RuntimeError, ValueError) as error:
                raise UserError(f'{shown(self.path)} has no metadata of subquad: {one_line(error)}') from error

    def prepare(self, threads: int) -> None:
        """Load the method for a pool of this many threads."""
        global _pools
        with contextlib.ExitStack() as stack:
            if self.forward is None:
                stack.enter_context(_silent())
            from executorch.extension.pybindings import portable_lib
            if portable_lib._threadpool_get_thread_count() != threads:
                stack.enter_context(_silent())
                portable_lib._unsafe_reset_threadpool(threads)
                _pools += 1
            if self.pool == _pools:
                return
            # A loaded method keeps a pointer to the pool, so a new pool needs a new method.
            stack.enter_context(_silent())
            try:
                self.forward = self._load().load_method('forward')
                self.largest_batch = self.forward.metadata.input_tensor_meta(0).sizes()[0]
            except RuntimeError as error:
                raise UserError(f'ExecuTorch cannot load {shown(self.path)}: {one_line(error)}') from error
            self.pool = _pools


def _check(images: Tensor, expected: Dict[str, Any], largest_batch: int) -> None:
    """Refuse images of another shape, for which the runtime would fail with a number only.

    Raises:
        UserError: The images are not float32, or have another shape than the file takes.
    """
    shape = list(expected['shape'])
    dynamic = 'batch' in expected['dynamic']
    batch = f'1 to {largest_batch}' if dynamic else str(shape[0])
    came = list(images.shape)
    fits = len(came) == 4 and came[1:] == shape[1:] and (
        1 <= came[0] <= largest_batch if dynamic else came[0] == shape[0])
    if not fits or images.dtype != torch.float32:
        raise UserError(f'the file takes float32 images of shape ({batch}, {", ".join(map(str, shape[1:]))}), '
                        f'got {images.dtype} {tuple(images.shape)}')


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discard what ExecuTorch writes: warnings, and lines that its C++ code writes to the process's error stream."""
    sys.stderr.flush()
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    disabled = logging.root.manager.disable
    try:
        os.dup2(sink, 2)
        logging.disable(logging.WARNING)
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(disabled)
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
