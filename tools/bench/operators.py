"""Operators of this package as `subquad benchmark` compares them: inputs, implementations, bytes and operations."""
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ... import kernels
from ...kernels.dispatch import BACKENDS, native_objection, why_not
from ...kernels.trees import quadtree_levels
from ..common.cli import UserError, nearest
from . import baselines
from .measure import count_macs

Grid = Tuple[int, int]
# Named sizes: images in pixels. Operators take the token grid of a network's third stage, at stride 16.
SIZES: Dict[str, Grid] = {'imagenet': (224, 224), 'coco': (800, 1280), 'cityscapes': (512, 2048), 'long': (4096, 4096)}
STRIDE = 16
# Keys of the memory of a recurrence, as in LCSM.
KEYS = 16
# The dense baselines are left out by default where their N x N matrices need more bytes than this.
_LARGEST_DENSE = 2e9


# --- inputs

def attention_inputs(batch: int, heads: int, grid: Grid, dim: int, dtype=torch.float32, device='cpu') -> List[Tensor]:
    """q, k (scaled), v: (B, heads, H, W, D); log_alpha, log_beta: (B, heads, H, W), between -1 and 0."""
    q, k, v = (torch.randn(batch, heads, *grid, dim, device=device) for _ in range(3))
    log_alpha, log_beta = (-torch.rand(batch, heads, *grid, device=device) for _ in range(2))
    return [x.to(dtype) for x in (q, k * dim ** -0.5, v)] + [log_alpha, log_beta]


def separable_inputs(batch: int, heads: int, grid: Grid, dim: int, dtype=torch.float32, device='cpu') -> List[Tensor]:
    """query: (B, H, W, 1); key, value: (B, H, W, heads * D); all dense, as in MobileViTv2's mixer."""
    return [torch.randn(batch, *grid, n, device=device, dtype=dtype) for n in (1, heads * dim, heads * dim)]


def tree_inputs(batch: int, heads: int, grid: Grid, dim: int, dtype=torch.float32, device='cpu') -> List[Tensor]:
    """Values of all levels, then edge weights of all levels but the last.

    Values are (B, heads, H_l, W_l, D) in the memory order of a network's layer; edge weights are (B, heads, H_l, W_l).
    """
    levels = quadtree_levels(*grid)
    values = [torch.randn(batch, level.height, level.width, heads, dim, device=device, dtype=dtype
                          ).permute(0, 3, 1, 2, 4) for level in levels]
    return values + [torch.rand(batch, heads, level.height, level.width, device=device, dtype=dtype) * 4 ** (n + 1)
                     for n, level in enumerate(levels[:-1])]


def recurrence_inputs(batch: int, heads: int, grid: Grid, dim: int, dtype=torch.float32, device='cpu') -> List[Tensor]:
    """i: (B, heads, H, W, D); e, s: (B, heads, H, W, KEYS); log_o_k: the same, between -0.1 and 0 and float32; all in
    the memory order of a network's layer."""
    i, e, s, log = (torch.randn(batch, *grid, heads, n, device=device) for n in (dim, KEYS, KEYS, KEYS))
    tensors = *(x.to(dtype) for x in (i, e * KEYS ** -0.5, s)), log.sigmoid() * -0.1
    return [x.permute(0, 3, 1, 2, 4) for x in tensors]


def delta_inputs(batch: int, heads: int, grid: Grid, dim: int, dtype=torch.float32, device='cpu') -> List[Tensor]:
    """i: (B, heads, H, W, D); key of length 1, s: (B, heads, H, W, KEYS); rate: (B, heads, H, W, 1), between 0 and 1;
    all in the memory order of a network's layer."""
    i, key, s, rate = (torch.randn(batch, *grid, heads, n, device=device) for n in (dim, KEYS, KEYS, 1))
    key, rate = key / key.norm(dim=-1, keepdim=True), rate.sigmoid()
    return [x.to(dtype).permute(0, 3, 1, 2, 4) for x in (i, key, s, rate)]


# --- operators

def _over_rows(call: Callable[..., Tensor], i: Tensor, *others: Tensor) -> Tensor:
    """Run an operator on lines (B, heads, T, c) over the rows of grids (B, heads, H, W, c)."""
    lines = [x.transpose(1, 2).flatten(0, 1) for x in (i, *others)]
    return call(*lines).unflatten(0, (i.shape[0], i.shape[2])).transpose(1, 2)


def _recurrence(*tensors: Tensor, backend: str) -> Tensor:
    return _over_rows(lambda i, e, s, log: kernels.eos_elementwise(
        i, e, s, log_o_k=log, bidirectional=True, backend=backend), *tensors)


def _delta_rule(*tensors: Tensor, backend: str) -> Tensor:
    return _over_rows(lambda i, key, s, rate: kernels.eos_matmul(
        i, rate * key, s, a=key, b=-rate * key, bidirectional=True, backend=backend), *tensors)


def _tree_solve(*tensors: Tensor, backend: str) -> Tensor:
    count = len(baselines.level_values(tensors))
    return kernels.quadtree_solve(tensors[:count], tensors[count:], backend=backend)[0]


@dataclass(frozen=True)
class Operator:
    """An operator and what it is compared with."""
    call: Callable[..., Tensor]                            # the operator, called with its inputs and `backend`
    baselines: Mapping[str, Callable[..., Tensor]]         # what users would write instead, by name
    used: Tuple[int, ...] = (0, 1, 2, 3, 4)                # indices of the inputs that the operator reads; () for all
    inputs: Callable[..., List[Tensor]] = attention_inputs  # function that creates the inputs
    # function from the inputs to those that have the shapes of the outputs
    outputs: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda inputs: inputs[2:3]
    # number of scans over the data, 0 for other operators. Each scan reads and writes the data once and does 3
    # multiply-adds per element (11 with gradients).
    passes: int = 0
    # multiply-adds per element of the output, without and with gradients. If () and without scans, the matrix
    # products are counted instead.
    elementwise: Tuple[int, ...] = ()


OPERATORS = {
    'polyline_attention': Operator(
        call=kernels.polyline_attention,
        baselines={
            'dense': baselines.dense_polyline_attention,
            'sdpa': baselines.sdpa_polyline_attention,
            'flex': baselines.flex_polyline_attention,
        },
    ),
    'decay_attention': Operator(
        call=lambda q, k, v, log_alpha, log_beta, backend: kernels.decay_attention(q, k, v, log_alpha, backend=backend),
        baselines={
            'dense': baselines.dense_decay_attention,
            'sdpa': baselines.sdpa_decay_attention,
            'flex': baselines.flex_decay_attention,
        },
        used=(0, 1, 2, 3),
    ),
    'crisscross_attention': Operator(
        call=kernels.crisscross_attention,
        baselines={'dense': baselines.dense_crisscross_attention},
    ),
    'polyline_scan': Operator(
        call=lambda q, k, v, log_alpha, log_beta, backend: kernels.polyline_scan(
            v, log_alpha, log_beta, backend=backend),
        baselines={'dense': baselines.dense_polyline_scan},
        used=(2, 3, 4),
        passes=2,
    ),
    'polyline_linear_attention': Operator(
        call=kernels.polyline_linear_attention,
        baselines={'dense': baselines.dense_polyline_linear_attention},
    ),
    'separable_attention': Operator(
        call=lambda query, key, value, backend: kernels.separable_attention(
            query, key, value, patch_size=baselines.patch_of(value), backend=backend),
        baselines={
            'eager': baselines.eager_separable_attention,
            'matmul': baselines.matmul_separable_attention,
        },
        used=(0, 1, 2),
        inputs=separable_inputs,
        elementwise=(2, 6),
    ),
    'quadtree_solve': Operator(
        call=_tree_solve,
        baselines={'loop': baselines.loop_quadtree_solve},
        used=(),
        inputs=tree_inputs,
        outputs=baselines.level_values,
        elementwise=(3, 7),
    ),
    'eos_elementwise': Operator(
        call=_recurrence,
        baselines={'fla': partial(_recurrence, backend='fla')},
        used=(),
        inputs=recurrence_inputs,
        outputs=lambda inputs: inputs[:1],
    ),
    'eos_matmul': Operator(
        call=_delta_rule,
        baselines={'fla': partial(_delta_rule, backend='fla')},
        used=(),
        inputs=delta_inputs,
        outputs=lambda inputs: inputs[:1],
    ),
}
OWN_BACKENDS = tuple(backend for backend in BACKENDS if backend not in ('auto', 'export'))


def implementations(op: str) -> List[str]:
    """Names that `operator_call` accepts: our backends, `compiled` (portable under torch.compile) and the baselines."""
    return [*OWN_BACKENDS, 'compiled', *OPERATORS[op].baselines]


def operator_call(op: str, implementation: str) -> Callable[..., Tensor]:
    """Look up one implementation of an operator.

    Returns:
        A function of the operator's inputs.
    """
    if op not in OPERATORS:
        raise UserError(f"unknown operator {op!r}{nearest(op, list(OPERATORS))}; there are {', '.join(OPERATORS)}")
    operator = OPERATORS[op]
    if implementation in OWN_BACKENDS:
        return partial(operator.call, backend=implementation)
    if implementation == 'compiled':
        return torch.compile(partial(operator.call, backend='portable'), dynamic=False)
    if implementation in operator.baselines:
        return operator.baselines[implementation]
    known = implementations(op)
    raise UserError(f'{op}: unknown implementation {implementation!r}{nearest(implementation, known)}; '
                    f"there are {', '.join(known)}")


def available(op: str, inputs: Sequence[Tensor]) -> List[str]:
    """Implementations that make sense for these inputs.

    Triton and native code are left out where they cannot run, FlexAttention and fla-core on CPUs, and dense matrices
    where they are too large.
    """
    tokens = inputs[0].shape[2] * inputs[0].shape[3]
    matrices = inputs[0].shape[:2].numel() * tokens ** 2 * 8 * 6
    left_out = set()
    if why_not(op, *inputs):
        left_out.add('triton')
    if native_objection(op, *inputs):
        left_out.add('native')
    if inputs[0].device.type == 'cpu':
        left_out |= {'flex', 'fla'}
    if not OPERATORS[op].elementwise and matrices >= _LARGEST_DENSE:
        left_out |= {'reference', 'dense', 'sdpa'}
    return [name for name in implementations(op) if name not in left_out]


# --- bytes, operations, gradients

def bytes_moved(op: str, inputs: Sequence[Tensor], backward: bool) -> int:
    """Bytes that any implementation must move.

    Forward, each input is read and each output written once. Backward, the inputs, the output and its gradient are read
    and the gradients of the inputs are written. A scan does this once per axis, and its gradient needs no output: two
    reads and a write of the data.
    """
    operator = OPERATORS[op]
    output = sum(x.numel() * x.element_size() for x in operator.outputs(inputs))
    read = sum(inputs[n].numel() * inputs[n].element_size() for n in operator.used or range(len(inputs)))
    if operator.passes:
        logs = read - output
        return operator.passes * output * (2 + 3 * backward) + logs * (1 + 2 * backward)
    return (read + output) + (2 * (read + output) if backward else 0)


def multiply_adds(op: str, inputs: Sequence[Tensor], backward: bool) -> int:
    """Multiply-adds of the operator's definition: the matrix products of attention, or the recurrences of a scan."""
    passes, elementwise = OPERATORS[op].passes, OPERATORS[op].elementwise
    if passes or elementwise:
        elements = sum(x.numel() for x in OPERATORS[op].outputs(inputs))
        return (passes or 1) * elements * (elementwise or (3, 11))[backward]
    call = operator_call(op, 'portable')
    return count_macs(with_gradients(call, inputs) if backward else partial(call, *inputs))


def with_gradients(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """A function that runs a call and computes the gradients of its output times fixed random numbers."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    weights: List[Tensor] = []

    def run():
        y = call(*inputs)
        if not weights:
            weights.append(torch.randn_like(y))
        return torch.autograd.grad(y, inputs, weights[0], allow_unused=True)
    return run
