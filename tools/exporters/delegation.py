"""What of an ExecuTorch program a delegate runs: operators outside, calls, and the share of the multiply-adds."""
import math
from collections import Counter
from typing import Any, Iterator, List

import torch
from torch.fx import Graph, Node

from .formats import Conversion


def delegation(before: int, after: Graph) -> Conversion:
    """Describe a graph with calls of delegates, which had `before` multiply-adds before it was partitioned."""
    # getitem only names one of several outputs; the runtime does nothing for it.
    names = Counter(map(operator_name, _calls(after)))
    calls, _ = names.pop('executorch_call_delegate', 0), names.pop('getitem', 0)
    return Conversion(dict(names.most_common()), calls, 1 - multiply_adds(after) / before if before else None)


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
    """Remove operators that return their argument, in place, and write the dynamic size of a reshape as -1."""
    for node in list(_calls(graph)):
        name = operator_name(node).split('.')[0]
        if name in ('expand_copy', 'alias_copy') and _same(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif name == 'view_copy':
            shape = [size if isinstance(size, int) else -1 for size in node.args[1]]
            if shape.count(-1) == 1:
                node.args = (node.args[0], shape)
    graph.eliminate_dead_code()


def _same(node: Node, source: Node) -> bool:
    after, before = node.meta['val'], source.meta['val']
    return isinstance(before, torch.Tensor) and (after.shape, after.dtype) == (before.shape, before.dtype)
