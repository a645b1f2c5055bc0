"""ExecuTorch (.pte): programs whose layers run in XNNPACK.

A file has two methods: `forward` maps images to the outputs, and `metadata`, without arguments, returns JSON text.
"""
import contextlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..common.cli import UserError, one_line, shown
from .formats import Conversion, Options
from .graph import LARGEST_BATCH, LARGEST_RANK, export_program, silence
from .subject import Subject
from .xnnpack_forms import fold_constants, halved, rewrite

# How often the thread pool, which all loaded programs share, has been replaced.
_pools = 0


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write a .pte file.

    fp16 computes with float16 weights and values; int8 quantizes the inputs and weights of convolutions and linear
    layers, with one scale for each output channel.
    """
    with silence():
        program, conversion = _lowered(_program(subject, options), json.dumps(subject.metadata, ensure_ascii=False))
        path.write_bytes(program.buffer)
    return conversion


def _program(subject: Subject, options: Options) -> torch.export.ExportedProgram:
    """Return the graph in the precision that was asked for, with operators that XNNPACK takes."""
    # PyTorch chooses a convolution by whether there are 16 images: an example of fewer would make 15 the limit.
    program = export_program(subject, options.dynamic, LARGEST_BATCH)
    if options.precision == 'int8':
        return rewrite(_quantized(fold_constants(program), options.calibration))
    program = rewrite(program)
    return halved(program) if options.precision == 'fp16' else program


# What is quantized. Norms, softmax and attention keep float32: their values span ranges that 8 bits do not cover.
_QUANTIZED = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)


def _quantized(program: torch.export.ExportedProgram, images: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """Quantize the inputs, weights and outputs of convolutions and linear layers after training (pt2e).

    Weights are symmetric int8 with a scale for each output channel; inputs and outputs are int8 with one scale and
    zero point each, from the ranges that the images (1, C, H, W), float32, give. The weights must be constants.
    """
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    quantizer, config = XNNPACKQuantizer(), get_symmetric_quantization_config(is_per_channel=True)
    for operator in _QUANTIZED:
        quantizer.set_operator_type(operator, config)
    with torch.no_grad():
        prepared = prepare_pt2e(program.module(check_guards=False), quantizer)
        for image in images:
            prepared(image)
        return torch.export.export(_leaving_once(convert_pt2e(prepared)), (program.example_inputs[0][0],),
                                   dynamic_shapes=_dynamic_shapes(program))


def _leaving_once(model: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Multiply quantized values by 1 where several operators of float32, a pad, or a concatenation read them.

    ExecuTorch 1.5 gives these readers quantized values in a wrong layout, or together with float32, and cannot load or
    run the file.
    """
    for value in model.graph.find_nodes(op='call_function',
                                        target=torch.ops.quantized_decomposed.dequantize_per_tensor.default):
        readers = [node for node in value.users if node.target not in _QUANTIZED]
        if len(readers) > 1 or readers and readers[0].target in (torch.ops.aten.pad.default,
                                                                 torch.ops.aten.cat.default):
            with model.graph.inserting_after(value):
                product = model.graph.call_function(torch.ops.aten.mul.Tensor, (value, 1.0))
            for node in readers:
                node.replace_input_with(value, product)
    model.recompile()
    return model


def _dynamic_shapes(program: torch.export.ExportedProgram):
    """Return the argument of torch.export for the batch of a program; None if its sizes are fixed."""
    images = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    batch = images.meta['val'].shape[0]
    if isinstance(batch, int):
        return None
    limits = program.range_constraints[batch.node.expr]
    return ({0: torch.export.Dim('batch', min=int(limits.lower), max=int(limits.upper))},)


def _lowered(program: torch.export.ExportedProgram, metadata: str) -> Tuple[Any, Conversion]:
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
    """
    program = _Program(path)
    program.prepare(threads)

    def run(images: Tensor) -> List[Tensor]:
        program.prepare(threads)
        try:
            return list(program.forward.execute((images.contiguous(),)))
        except RuntimeError as error:
            raise UserError(f'ExecuTorch cannot run {shown(path)} on {images.dtype} {tuple(images.shape)}: '
                            f'{one_line(error)}') from error
    return run


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata of a .pte file."""
    program = _Program(path)
    with silence():
        return json.loads(program.method('metadata').execute(())[0])


class _Program:
    """A .pte file in memory; `forward` is the loaded method."""

    def __init__(self, path: Path):
        self.path, self.pool, self.forward = path, -1, None
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise UserError(f'cannot read {shown(path)} ({error.strerror or error})') from error
        if self.content[4:8] != b'ET12':              # the runtime aborts the process on some other files
            raise UserError(f'{shown(path)} is not an ExecuTorch program')

    def method(self, name: str) -> Any:
        with silence():
            from executorch.runtime import Runtime
            try:
                self.program = Runtime.get().load_program(self.content)          # methods need it
                return self.program.load_method(name)
            except (RuntimeError, ValueError) as error:
                raise UserError(f'{shown(self.path)} is not a whole ExecuTorch program of `subquad export`: '
                                f'{one_line(error)}') from error

    def prepare(self, threads: int) -> None:
        """Load the method for a pool of this many threads."""
        global _pools
        with silence():
            from executorch.extension.pybindings import portable_lib
            now = portable_lib._threadpool_get_thread_count()            # its first call prints about the CPU
        if now != threads:
            with silence():
                portable_lib._unsafe_reset_threadpool(threads)
            _pools += 1
        if self.pool != _pools:      # a loaded method keeps a pointer to the pool, so a new pool needs a new method
            self.forward, self.pool = self.method('forward'), _pools


# ---- what of a program a delegate runs

def delegation(before: int, after: Graph) -> Conversion:
    """Describe a graph with calls of delegates, which had `before` multiply-adds before it was partitioned."""
    # getitem only names one of several outputs; the runtime does nothing for it.
    names = Counter(map(operator_name, _calls(after)))
    calls, _ = names.pop('executorch_call_delegate', 0), names.pop('getitem', 0)
    return Conversion(dict(names.most_common()), calls,
                      1 - multiply_adds(after) / before if before else None)


def multiply_adds(graph: Graph) -> int:
    """Count the multiply-adds of convolutions, linear layers and matrix products of a graph, without delegates.

    Dynamic sizes count as the sizes of the example.
    """
    return sum(_multiply_adds(node) for node in _calls(graph))


def _multiply_adds(node: Node) -> int:
    """An output element of a convolution or product is a sum of as many products as its weights or rows have."""
    name = operator_name(node).split('.')[0]
    if name in ('convolution', 'conv2d', 'conv1d'):
        image, weight = _shape(node.args[0]), _shape(node.args[1])
        transposed = name == 'convolution' and node.args[6]
        return math.prod(image if transposed else _shape(node)) * math.prod(weight[1:])
    if name in ('linear', 'mm', 'bmm', 'matmul', 'mv'):
        return math.prod(_shape(node)) * _shape(node.args[0])[-1]
    if name == 'addmm':
        return math.prod(_shape(node)) * _shape(node.args[1])[-1]
    return 0


def highest_rank(graph: Graph) -> int:
    """Return the largest number of dimensions of a graph's tensors."""
    found = (node.meta.get('val') for node in graph.nodes)
    values = (value for entry in found for value in (entry if isinstance(entry, (list, tuple)) else [entry]))
    return max((value.ndim for value in values if isinstance(value, torch.Tensor)), default=0)


def _calls(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == 'call_function')


def operator_name(node: Node) -> str:
    """Return the name of a node's operator without its namespace, such as 'convolution.default' or 'getitem'."""
    return getattr(node.target, '__name__', str(node.target)).removeprefix('aten.').removeprefix('dim_order_ops.')


def _shape(node: Any) -> List[int]:
    value = node.meta['val']
    value = value[0] if isinstance(value, (list, tuple)) else value
    return [size if isinstance(size, int) else int(size.node.hint) for size in value.shape]


def remove_copies(graph: Graph) -> None:
    """Remove operators that return their argument, in place, and reshapes of reshapes.

    The dynamic size of a reshape becomes -1.
    """
    for node in list(_calls(graph)):
        name = operator_name(node).split('.')[0]
        if name in ('expand_copy', 'alias_copy') and _same(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif name == 'view_copy':
            source = node.args[0]
            if operator_name(source).split('.')[0] == 'view_copy':
                source = source.args[0]
            shape = [size if isinstance(size, int) else -1 for size in node.args[1]]
            node.args = (source, shape if shape.count(-1) == 1 else node.args[1])
    graph.eliminate_dead_code()


def _same(node: Node, source: Node) -> bool:
    after, before = node.meta['val'], source.meta['val']
    return (isinstance(before, torch.Tensor) and (after.ndim, after.dtype) == (before.ndim, before.dtype)
            # Comparing directly would fix a dynamic batch to the size of the example.
            and all(statically_known_true(size == other) for size, other in zip(after.shape, before.shape)))
