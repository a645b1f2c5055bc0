"""`backend='fla'`: the recurrences by operators of fla-core (flash-linear-attention), an optional package.

Its operators run along a line from the first token to the last, on tensors (B, T, H, channels). Other directions flip
the line, and both directions are two calls. They have no oscillation of full rank.
"""
import importlib
import importlib.util
from typing import Any, Dict, Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from ..common.launch import interpreted
from ..common.numerics import needs_gradient
from .problem import Oscillation, Output, RealProblem, own_term, solve, steps_of

# Keys of the largest memory that their delta rules take.
LARGEST_KEYS = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Row(NamedTuple):
    """An operator of fla-core.

    Attributes:
        module, name: where it is.
        options: what it gets beside tensors. Its default scale is K^-0.5, and ours is 1.
        differentiable: whether it has a backward pass.
    """

    module: str
    name: str
    options: Mapping[str, Any] = {}
    differentiable: bool = True


# The operator for an oscillation that is 1, one decay for the whole memory, decays of its rows and columns, and the
# identity or decays of rows plus a matrix of rank one.
ROWS: Dict[str, Row] = {
    'ones': Row('fla.ops.linear_attn', 'fused_recurrent_linear_attn', {'normalize': False}),
    'scalar': Row('fla.ops.simple_gla', 'fused_recurrent_simple_gla'),
    'gates': Row('fla.ops.gla', 'fused_recurrent_gla'),
    'delta': Row('fla.ops.generalized_delta_rule', 'fused_recurrent_iplr_delta_rule'),
    'gated delta': Row('fla.ops.generalized_delta_rule', 'fused_recurrent_dplr_delta_rule', differentiable=False),
}


def installed() -> bool:
    """Whether fla-core is installed. This does not import it."""
    return importlib.util.find_spec('fla') is not None


def _per_token(log: Tensor, i: Tensor) -> Tensor:
    """Return canonical step logs as (B, H, T, c)."""
    return log.expand(*i.shape[:3], log.shape[3])


def row_of(log_k: Optional[Tensor], log_d: Optional[Tensor]) -> str:
    """Return the key in ROWS for the canonical step logs of an elementwise oscillation."""
    if log_k is None and log_d is None:
        return 'ones'
    return 'scalar' if log_d is None and log_k.shape[3] == 1 else 'gates'


def why_not(row: str, i: Tensor, state: Optional[Tensor], output_state: bool, *others: Optional[Tensor]
            ) -> Optional[str]:
    """Explain in one sentence why fla-core cannot run a row of ROWS on these tensors; None if it can."""
    if not installed():
        return 'fla-core is not installed (pip install fla-core).'
    if i.device.type != 'cuda' and not interpreted():
        return f'the arguments are on {i.device}, and fla-core runs on a GPU or with TRITON_INTERPRET=1.'
    if i.dtype not in _DTYPES:
        return f'fla-core takes float32, float16 and bfloat16, and the arguments are {i.dtype}.'
    if needs_gradient(i, state, *others):
        if not ROWS[row].differentiable:
            return f'{ROWS[row].name} has no backward pass.'
        if state is not None or output_state:
            return 'the memory at an end of the line has no gradient there.'
    return None


def _run(op: str, row: str, i: Tensor, tokens: Mapping[str, Tensor], state: Optional[Tensor], direction: str,
         output_state: bool) -> Output:
    """Run a row in one direction or both, where each counts the term of a token itself."""
    objection = why_not(row, i, state, output_state, *tokens.values())
    if objection:
        raise ValueError(f"{op}: backend 'fla' cannot run: {objection}")
    function = getattr(importlib.import_module(ROWS[row].module), ROWS[row].name)
    state = None if state is None else state.float().contiguous()

    def run(reverse: bool) -> Output:
        given = {name: (x.flip(2) if reverse else x).transpose(1, 2).contiguous() for name, x in tokens.items()}
        y, last = function(**given, **ROWS[row].options, scale=1.0, initial_state=state,
                           output_final_state=output_state)
        y = y.transpose(1, 2)
        return y.flip(2) if reverse else y, last
    y, last = run(direction == 'reverse')
    if direction == 'both':
        y = y + run(True)[0]
    return y, last if output_state else None


def _run_problem(problem: RealProblem, direction: str, output_state: bool, chunk: int) -> Output:
    op, (i, e, s, log_k, log_d), state = 'eos_elementwise', problem[:5], problem.state
    if problem.full_rank:
        raise ValueError(f"{op}: backend 'fla' cannot run: fla-core has no oscillation of full rank and no constant e "
                         'or s.')
    row, tokens = row_of(log_k, log_d), dict(q=s, k=e, v=i)
    if row == 'scalar':
        tokens['g'] = _per_token(log_k, i).squeeze(3)
    elif row == 'gates':
        logs = {'gk': (log_k, e.shape[3]), 'gv': (log_d, i.shape[3])}
        tokens.update({name: _per_token(log, i).expand(-1, -1, -1, channels)
                       for name, (log, channels) in logs.items() if log is not None})
    y, last = _run(op, row, i, tokens, state, direction, output_state)
    return (y - own_term(i, e, s)).to(i.dtype) if direction == 'both' else y, last


def eos_elementwise_fla(i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, scale: float, direction: str,
                        initial_state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    """Run `eos_elementwise` by fla-core.

    Raises:
        ValueError: fla-core is not installed or cannot run these arguments.
    """
    return solve(_run_problem, i, e, s, oscillation, scale, direction, initial_state, output_state, chunk)


def eos_matmul_fla(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Optional[Tensor], scale: float,
                   direction: str, initial_state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    """Run `eos_matmul` by fla-core.

    Raises:
        ValueError: fla-core is not installed or cannot run these arguments.
    """
    if e.shape[3] > LARGEST_KEYS:
        raise ValueError(f"eos_matmul: backend 'fla' cannot run: its delta rules take at most {LARGEST_KEYS} keys, got "
                         f'{e.shape[3]}.')
    tokens, steps = dict(q=s, k=e, v=i, a=a, b=b), steps_of(gk, i.dtype)
    if steps is not None:
        tokens['gk'] = _per_token(steps, i).expand(e.shape)
    y, last = _run('eos_matmul', 'delta' if steps is None else 'gated delta', i, tokens, initial_state, direction,
                   output_state)
    if direction == 'both':
        y = y - own_term(i, e, s)
    return (y * scale).to(i.dtype), last
