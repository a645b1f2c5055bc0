"""How fast the memories of a recurrence decay, and after how many tokens little is left of what a token wrote."""
from typing import Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from ...kernels.common.numerics import bounded
from ...kernels.eos_scan import DecayGenerator
from ...kernels.eos_scan.generator import generated_logs
from ...kernels.eos_scan.problem import per_token

# Slower decays than this per token count as this one, so that memory lengths are finite.
_SLOWEST = 1e-6


class StateDecay(NamedTuple):
    """The decays of the memories of a layer: the absolute values of the oscillation o (section 3.1 of the paper).

    Attributes:
        logs: for each head and token, the mean of log o over the elements of the memory; exp(logs) is their geometric
            mean. (B, heads, H, W), or (1, heads, 1, 1) where all tokens decay alike.
        elements: for each element of the memory, the mean of log o over images and tokens, (heads, elements). Elements
            that decay alike count once.
    """

    logs: Tensor
    elements: Tensor


def state_decay(decays: Dict[str, Union[Tensor, DecayGenerator]], height: int, width: int) -> StateDecay:
    """Reduce step logs to those of heads.

    Args:
        decays: step logs as arguments of `eos_elementwise`, with T = height * width or constant in time; log_o only
            constant.
        height, width: sizes of the map.
    """
    parts = []                                           # logs (B, heads, T), and (heads, K, D); B, T, K, D may be 1
    for name, x in decays.items():
        if isinstance(x, DecayGenerator):
            parts.append(_generated(x))
        elif name == 'log_o':
            parts.append(_reduced(bounded(x)[None, :, None]))
        else:
            parts.append(_reduced(bounded(per_token(x)).unsqueeze(-1 if name == 'log_o_k' else -2)))
    logs = sum(log for log, _ in parts)
    elements = torch.broadcast_tensors(*(element for _, element in parts))
    elements = sum(elements).flatten(1)
    return StateDecay(logs.unflatten(2, (height, width) if logs.shape[2] > 1 else (1, 1)), elements)


def _reduced(log: Tensor) -> Tuple[Tensor, Tensor]:
    """Return the means of (B, heads, T, K, D) over elements, (B, heads, T), and over images and tokens."""
    return log.mean((3, 4)), log.mean((0, 2))


def _generated(x: DecayGenerator) -> Tuple[Tensor, Tensor]:
    """Compute one head at a time: the decays of all of them may not fit into the memory."""
    found: List[Tuple[Tensor, Tensor]] = []
    for head, weight in enumerate(x.weight.expand(x.z.shape[1], -1, -1).unbind()):
        z = x.z[:, head:head + 1].unsqueeze(-1 if x.axis == 'k' else -2)
        found.append(_reduced(bounded(generated_logs(z, weight, x.form, x.tau))))
    logs, elements = zip(*found)
    return torch.cat(logs, 1), torch.cat(elements)


def memory_lengths(logs: Tensor, dim: int, reverse: Optional[bool] = None) -> Tensor:
    """Return how many tokens after each token the product of decays falls to 1/e.

    Beyond the last token of a line, the mean decay of the line goes on. Numbers between tokens are interpolated in the
    logarithm; decays above exp(-1e-6) count as exp(-1e-6).

    Args:
        logs: step logs <= 0, such as those of `StateDecay`.
        dim: the axis of the lines.
        reverse: run from the last token to the first, or, if None, return the mean of both directions.

    Returns:
        Lengths in tokens, of the shape of `logs`, in float64.
    """
    if reverse is None:
        return (memory_lengths(logs, dim, False) + memory_lengths(logs, dim, True)) / 2
    rates = -logs.double().movedim(dim, -1)
    rates = (rates.flip(-1) if reverse else rates).clamp(min=_SLOWEST).contiguous()
    total, mean = rates.cumsum(-1), rates.mean(-1, keepdim=True)
    last = rates.shape[-1] - 1
    goal = total + 1
    # The first token whose sum reaches the goal; the line ends before `after` = last + 1.
    after = torch.searchsorted(total, goal)
    inside = after.clamp(max=last)
    start = torch.arange(last + 1, device=logs.device)
    reached = inside - start - (total.gather(-1, inside) - goal) / rates.gather(-1, inside)
    beyond = last - start + (goal - total[..., -1:]) / mean
    lengths = torch.where(after <= last, reached, beyond)
    return (lengths.flip(-1) if reverse else lengths).movedim(-1, dim)
