"""Peak memory of recurrences whose oscillation has full rank, beside the form that stores o and m for all tokens."""
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import eos_elementwise
from subquad.kernels.eos_scan import DecayGenerator
from subquad.tools.bench.measure import peak_memory
from subquad.tools.bench.metrics import metric, peak_memory_metrics, ratio

TAU = 16.0


class Form(NamedTuple):
    """A recurrence over one line.

    Attributes:
        inputs: function of the numbers of tokens, keys and channels.
        output: function of the inputs, by the operator.
        materialized: the same with T x K x D numbers in memory.
    """

    inputs: Callable[[int, int, int], List[Tensor]]
    output: Callable[..., Tensor]
    materialized: Callable[..., Tensor]


def _generated_inputs(length: int, keys: int, dim: int) -> List[Tensor]:
    """i, e, s, z and the weight of a `DecayGenerator`."""
    tokens = [torch.randn(1, 1, length, n) for n in (dim, keys, keys, keys)]
    return [*tokens, torch.randn(1, keys, dim)]


def _generated(i: Tensor, e: Tensor, s: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    return eos_elementwise(i, e, s, generator=DecayGenerator(z, weight, 'k', tau=TAU), backend='portable')


def _materialized(i: Tensor, e: Tensor, s: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    o = (F.logsigmoid(z[..., None] * weight[:, None]) / TAU).exp()
    state, outputs = torch.zeros_like(o[:, :, 0]), []
    for step, key, query, value in zip(*(x.unbind(2) for x in (o, e, s, i))):
        state = torch.addcmul(key[..., None] * value[..., None, :], step, state)
        outputs.append((query[..., None] * state).sum(-2))
    return torch.stack(outputs, 2)


def _angle_inputs(length: int, keys: int, dim: int) -> List[Tensor]:
    """i; complex e and s, step logs and angles, all constant."""
    constant = [torch.randn(1, keys, dim, dtype=torch.complex64) for _ in range(2)]
    return [torch.randn(1, 1, length, dim), *constant, -0.1 * torch.rand(1, keys, dim), torch.randn(1, keys, dim)]


def _angles(i: Tensor, e: Tensor, s: Tensor, log: Tensor, theta: Tensor) -> Tensor:
    return eos_elementwise(i, e, s, log_o=log, theta=theta, backend='portable')


def _materialized_angles(i: Tensor, e: Tensor, s: Tensor, log: Tensor, theta: Tensor) -> Tensor:
    o = torch.polar(log.exp(), theta)[:, None].repeat(1, i.shape[2], 1, 1)
    state, memories = torch.zeros_like(o[:, 0]), []
    for step, added in zip(o.unbind(1), (e[:, None] * i[0, :, :, None]).unbind(1)):
        state = torch.addcmul(added, step, state)
        memories.append(state)
    return (s[:, None] * torch.stack(memories, 1)).sum(-2).real[None]


FORMS: Dict[str, Form] = {
    'full rank': Form(_generated_inputs, _generated, _materialized),
    'constant angles': Form(_angle_inputs, _angles, _materialized_angles),
}


def both_passes(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Compute the gradients of the sum of squares of an output with respect to all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.grad(function(*leaves).square().sum(), leaves)


def line_memory(repeats: int, *, length: int, keys: int, dim: int, max_share: float = 1 / 8) -> Dict[str, Any]:
    """Measure the memory of forward and backward passes of each of FORMS over one line.

    Args:
        repeats: Rounds; the largest peak counts.
        length: Number of tokens.
        keys: Keys of the memory.
        dim: Channels.
        max_share: Target: peak memory over that of the form with T x K x D numbers.
    """
    peaks: Dict[str, Optional[float]] = {}
    for kind, form in FORMS.items():
        inputs = form.inputs(length, keys, dim)
        for name, function in ((kind, form.output), (f'{kind}, materialized', form.materialized)):
            both_passes(function, form.inputs(65, 1, 1))         # so that lazy initialization does not count
            found = [peak_memory(partial(both_passes, function, inputs)) for _ in range(repeats)]
            peaks[name] = None if None in found else max(found)
    return {'times_ms': {}, 'peak_mb': peaks, 'floor': None, 'metrics': [
        *(metric(f'{kind}: memory with gradients / memory of the form that stores o and m of all tokens',
                 ratio(peaks[kind], peaks[f'{kind}, materialized']), 'x', at_most=max_share) for kind in FORMS),
        *peak_memory_metrics(peaks)]}
