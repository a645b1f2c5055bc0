"""What `subquad benchmark` can set against each other: our operators on every backend and what users would write
instead."""
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import kernels
from ...kernels.common.decay import column_log_decay, cumulative, row_log_decay
from ...kernels.dispatch import BACKENDS, why_not
from ...kernels.polyline_attention.reference import polyline_log_masks
from ...kernels.trees import quadtree_levels
from ..common.cli import UserError, nearest
from .measure import count_macs

Grid = Tuple[int, int]
# Named sizes: images in pixels. Operators take the grid of a network's third stage, at stride 16.
SIZES: Dict[str, Grid] = {'224': (224, 224), '800x1280': (800, 1280), '512x2048': (512, 2048), 'long': (4096, 4096)}
STRIDE = 16


def attention_inputs(batch: int, heads: int, grid: Grid, dim: int, dtype=torch.float32, device='cpu') -> List[Tensor]:
    """q, k (scaled), v: (B, heads, H, W, D) and step logs a, b: (B, heads, H, W) between -1 and 0."""
    q, k, v = (torch.randn(batch, heads, *grid, dim, device=device) for _ in range(3))
    a, b = (-torch.rand(batch, heads, *grid, device=device) for _ in range(2))
    return [x.to(dtype) for x in (q, k * dim ** -0.5, v)] + [a, b]


# --- polyline attention as one would write it

def dense_polyline_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The formula with its N x N matrices: 1/2 (softmax(q k' + log L) + softmax(q k' + log L~)) v. Arguments and result
    as for kernels.polyline_attention."""
    log_mask, _ = polyline_log_masks(a, b)
    logits = q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2)
    weights = (logits + log_mask).softmax(-1) + (logits + log_mask.transpose(-1, -2)).softmax(-1)
    # The mean's 1/2 on the small output rather than on the weights: a pass over memory that the formula can do without.
    return ((weights.to(v.dtype) @ v.flatten(2, 3)) * 0.5).view(v.shape)


def sdpa_polyline_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's fused attention twice, each mask made beforehand and held whole."""
    tokens = [x.flatten(2, 3) for x in (q, k, v)]
    parts = [F.scaled_dot_product_attention(*tokens, attn_mask=mask.to(q.dtype), scale=1.0)
             for mask in polyline_log_masks(a, b)]
    return ((parts[0] + parts[1]) * 0.5).view(v.shape)


def flex_polyline_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's FlexAttention twice, each log mask computed where it is used by a score_mod."""
    sa, sb, width = cumulative(a, -1, a.dtype), cumulative(b, -2, b.dtype), q.shape[3]

    def decayed(score, n, h, start, end):
        """The path from token `start` along its row, then along a column to token `end`."""
        i, j, row, column = start // width, start % width, end // width, end % width
        return (score - (sa[n, h, i, j] - sa[n, h, i, column]).abs()
                - (sb[n, h, i, column] - sb[n, h, row, column]).abs())

    def v2h(score, n, h, query, key):
        return decayed(score, n, h, query, key)

    def h2v(score, n, h, query, key):
        return decayed(score, n, h, key, query)

    tokens, flex = [x.flatten(2, 3) for x in (q, k, v)], _flex_attention()
    return ((flex(*tokens, score_mod=v2h, scale=1.0) + flex(*tokens, score_mod=h2v, scale=1.0)) * 0.5).view(v.shape)


def _flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False)


# --- attention within rows as one would write it

def dense_decay_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """softmax(q k' + log alpha) v within rows, the matrices of all rows at once."""
    return ((q @ k.transpose(-1, -2) + row_log_decay(a, a.dtype)).softmax(-1)).to(v.dtype) @ v


def sdpa_decay_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's fused attention on rows, with the mask held whole."""
    rows = [x.flatten(1, 2) for x in (q, k, v)]
    mask = row_log_decay(a, a.dtype).flatten(1, 2).to(q.dtype)
    return F.scaled_dot_product_attention(*rows, attn_mask=mask, scale=1.0).view(v.shape)


def flex_decay_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's FlexAttention on rows."""
    sums = cumulative(a, -1, a.dtype).flatten(1, 2)

    def decayed(score, n, line, query, key):
        return score - (sums[n, line, query] - sums[n, line, key]).abs()
    return _flex_attention()(*(x.flatten(1, 2) for x in (q, k, v)), score_mod=decayed, scale=1.0).view(v.shape)


def dense_crisscross_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The formula with the weights of all rows and all columns at once."""
    rows = (q @ k.transpose(-1, -2) + row_log_decay(a, a.dtype)).softmax(-1).to(v.dtype)
    queries, keys = (x.transpose(2, 3) for x in (q, k))
    decay = column_log_decay(b, b.dtype).permute(0, 1, 4, 2, 3)
    columns = (queries @ keys.transpose(-1, -2) + decay).softmax(-1).to(v.dtype)
    down = (columns @ v.transpose(2, 3)).transpose(2, 3)
    along = columns @ (rows @ v).transpose(2, 3)
    return (rows @ down + along.transpose(2, 3)) * 0.5


# --- the scan as one would write it

def dense_polyline_scan(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """L x with the N x N mask ("naive" in the paper's Figure 10)."""
    return (polyline_log_masks(a, b)[0].exp().to(v.dtype) @ v.flatten(2, 3)).view(v.shape)


def dense_polyline_linear_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """(q k' * (L + L~)) v with its N x N matrices."""
    log_masks = polyline_log_masks(a, b)
    weights = (q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2)) * (log_masks[0].exp() + log_masks[1].exp())
    return (weights.to(v.dtype) @ v.flatten(2, 3)).view(v.shape)


# --- separable attention as one would write it

def separable_inputs(batch: int, heads: int, grid: Grid, dim: int, dtype=torch.float32, device='cpu') -> List[Tensor]:
    """query (B, H, W, 1), key, value (B, H, W, heads * D), each dense, as MobileViTv2's mixer has them."""
    return [torch.randn(batch, *grid, n, device=device, dtype=dtype) for n in (1, heads * dim, heads * dim)]


def _patch(x: Tensor) -> Tuple[int, int]:
    """2 x 2 on a grid; a sequence, a grid of one row, has none."""
    return (2, 2) if x.shape[1] > 1 else (1, 1)


def eager_separable_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula on unfolded tokens: a copy of each tensor on the way in, one on the way out."""
    (height, width), patch = value.shape[1:3], _patch(value)

    def unfolded(x):
        x = x.reshape(len(x), height // patch[0], patch[0], width // patch[1], patch[1], -1)
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)               # (B, P, N, D)
    query, key, value = (unfolded(x) for x in (query, key, value))
    y = value.relu() * (key * query.softmax(2)).sum(2, keepdim=True)
    y = y.reshape(len(y), *patch, height // patch[0], width // patch[1], -1)
    return y.permute(0, 3, 1, 4, 2, 5).reshape(len(y), height, width, -1)


def matmul_separable_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Slices in place of copies, and the context as a matrix product, for one place in a patch after the other. On a
    sequence, the shortest form there is."""
    patch = _patch(value)
    if patch == (1, 1) and not torch.is_grad_enabled():
        return value.relu().mul_(query[:, 0].softmax(1).transpose(1, 2).bmm(key[:, 0])[:, None])
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    for i in range(patch[0]):
        for j in range(patch[1]):
            q, k = (x[:, i::patch[0], j::patch[1]].flatten(1, 2) for x in (query, key))
            context = q.softmax(1).transpose(1, 2) @ k                                # (B, 1, D)
            out[:, i::patch[0], j::patch[1]] = value[:, i::patch[0], j::patch[1]].relu() * context[:, :, None]
    return out


# --- the quad-tree solve as one would write it

def tree_inputs(batch: int, heads: int, grid: Grid, dim: int, dtype=torch.float32, device='cpu') -> List[Tensor]:
    """Values (B, heads, H_l, W_l, D) of all levels, in the memory order of a layer, then weights of edges
    (B, heads, H_l, W_l) of all levels but the last."""
    levels = quadtree_levels(*grid)
    values = [torch.randn(batch, level.height, level.width, heads, dim, device=device, dtype=dtype
                          ).permute(0, 3, 1, 2, 4) for level in levels]
    return values + [torch.rand(batch, heads, level.height, level.width, device=device, dtype=dtype) * 4 ** (n + 1)
                     for n, level in enumerate(levels[:-1])]


def _values(tensors: Sequence[Tensor]) -> List[Tensor]:
    return list(tensors[:(len(tensors) + 1) // 2])


def _tree_solve(*tensors: Tensor, backend: str) -> Tensor:
    count = len(_values(tensors))
    return kernels.quadtree_solve(tensors[:count], tensors[count:], backend=backend)[0]


def loop_quadtree_solve(*tensors: Tensor) -> Tensor:
    """The Laplacian's solve level by level, which autograd differentiates: what one writes first."""
    values, edges = _values(tensors), tensors[len(_values(tensors)):]

    def fold(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).sum((3, 5))

    def unfold(x: Tensor, like: Tensor) -> Tensor:
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return x[:, :, :like.shape[2], :like.shape[3]]

    right, scales, pulls, excess = [values[0]], [], [], torch.ones_like(values[0][..., :1])
    for edge, value in zip((edge[..., None] for edge in edges), values[1:]):
        scales.append(1 / (excess + edge))
        pulls.append(edge * scales[-1])
        right.append(value + fold(pulls[-1] * right[-1]))
        excess = 1 + fold(pulls[-1] * excess)
    x = right[-1] / excess
    for r, scale, pull in zip(right[-2::-1], scales[::-1], pulls[::-1]):
        x = r * scale + pull * unfold(x, r)
    return x


@dataclass(frozen=True)
class Operator:
    """An operator of ours: how it is called (its inputs, backend), and what users would write instead.

    passes: scans of the data, (tokens, channels), that it is made of: each reads and writes it and does 3 multiply-adds
        an element (11 with gradients). 0: its products are counted.
    used: which of its inputs it reads, () for all.
    inputs: how they are made.
    outputs: those of the inputs that have the shapes of its outputs.
    elementwise: multiply-adds an element of the output, and with gradients, where its products are not counted."""
    call: Callable[..., Tensor]
    others: Mapping[str, Callable[..., Tensor]]
    passes: int = 0
    used: Tuple[int, ...] = (0, 1, 2, 3, 4)
    inputs: Callable[..., List[Tensor]] = attention_inputs
    elementwise: Tuple[int, ...] = ()
    outputs: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda inputs: inputs[2:3]


OPERATORS = {
    'polyline_attention': Operator(
        lambda q, k, v, a, b, backend: kernels.polyline_attention(q, k, v, a, b, backend=backend),
        {'dense': dense_polyline_attention, 'sdpa': sdpa_polyline_attention, 'flex': flex_polyline_attention}),
    'decay_attention': Operator(
        lambda q, k, v, a, b, backend: kernels.decay_attention(q, k, v, a, backend=backend),
        {'dense': dense_decay_attention, 'sdpa': sdpa_decay_attention, 'flex': flex_decay_attention},
        used=(0, 1, 2, 3)),
    'crisscross_attention': Operator(
        lambda q, k, v, a, b, backend: kernels.crisscross_attention(q, k, v, a, b, backend=backend),
        {'dense': dense_crisscross_attention}),
    'polyline_scan': Operator(
        lambda q, k, v, a, b, backend: kernels.polyline_scan(v, a, b, backend=backend),
        {'dense': dense_polyline_scan}, passes=2, used=(2, 3, 4)),
    'polyline_linear_attention': Operator(
        lambda q, k, v, a, b, backend: kernels.polyline_linear_attention(q, k, v, a, b, backend=backend),
        {'dense': dense_polyline_linear_attention}),
    'separable_attention': Operator(
        lambda q, k, v, backend: kernels.separable_attention(q, k, v, patch_size=_patch(v), backend=backend),
        {'eager': eager_separable_attention, 'matmul': matmul_separable_attention}, used=(0, 1, 2),
        inputs=separable_inputs, elementwise=(2, 6)),
    'quadtree_solve': Operator(_tree_solve, {'loop': loop_quadtree_solve}, inputs=tree_inputs, elementwise=(3, 7),
                               outputs=_values, used=()),
}
OURS = tuple(backend for backend in BACKENDS if backend not in ('auto', 'export'))


def contestants(op: str) -> List[str]:
    """Names that `operator_call` takes for an operator: backends, `compiled` (portable, torch.compile) and others."""
    return [*OURS, 'compiled', *OPERATORS[op].others]


def operator_call(op: str, contestant: str) -> Callable[..., Tensor]:
    """A function of the operator's inputs.

    Raises:
        UserError: unknown operator or contestant.
    """
    if op not in OPERATORS:
        raise UserError(f"unknown operator {op!r}{nearest(op, list(OPERATORS))}; there are {', '.join(OPERATORS)}")
    operator = OPERATORS[op]
    if contestant in OURS:
        return partial(operator.call, backend=contestant)
    if contestant == 'compiled':
        return torch.compile(partial(operator.call, backend='portable'), dynamic=False)
    if contestant in operator.others:
        return operator.others[contestant]
    raise UserError(f"{op}: unknown contestant {contestant!r}{nearest(contestant, contestants(op))}; "
                    f"there are {', '.join(contestants(op))}")


def bytes_moved(op: str, inputs: Sequence[Tensor], backward: bool) -> int:
    """Bytes that any implementation must move: each input read and each output written once; backward, the inputs, the
    output and its gradient read, and the gradients of the inputs written. A scan does so for every axis, where its
    gradient needs no output: two reads and a write of the data."""
    operator = OPERATORS[op]
    output = sum(x.numel() * x.element_size() for x in operator.outputs(inputs))
    read = sum(inputs[n].numel() * inputs[n].element_size() for n in operator.used or range(len(inputs)))
    if operator.passes:
        logs = read - output
        return operator.passes * output * (2 + 3 * backward) + logs * (1 + 2 * backward)
    return (read + output) + (2 * (read + output) if backward else 0)


def multiply_adds(op: str, inputs: Sequence[Tensor], backward: bool) -> int:
    """Multiply-adds of the definition: of the products of attention, or of a scan's recurrences."""
    passes, elementwise = OPERATORS[op].passes, OPERATORS[op].elementwise
    if passes or elementwise:
        elements = sum(x.numel() for x in OPERATORS[op].outputs(inputs))
        return (passes or 1) * elements * (elementwise or (3, 11))[backward]
    call = operator_call(op, 'portable')
    return count_macs(step(call, inputs) if backward else partial(call, *inputs))


def step(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """A call and its gradients, of the sum of the output times fixed random numbers."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    weights: List[Tensor] = []

    def run():
        y = call(*inputs)
        if not weights:
            weights.append(torch.randn_like(y))
        return torch.autograd.grad(y, inputs, weights[0], allow_unused=True)
    return run


def available(op: str, inputs: Sequence[Tensor]) -> List[str]:
    """Contestants that make sense here: Triton only where it can run, the reference only where it is small."""
    tokens = inputs[0].shape[2] * inputs[0].shape[3]
    fits = OPERATORS[op].elementwise or inputs[0].shape[:2].numel() * tokens ** 2 * 8 * 6 < 2e9
    refused = {'triton'} if why_not(op, *inputs) else set()
    refused |= {'flex'} if inputs[0].device.type == 'cpu' else set()
    refused |= set() if fits else {'reference', 'dense', 'sdpa'}
    return [name for name in contestants(op) if name not in refused]
