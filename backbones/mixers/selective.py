"""Selective scan with its projections: what Mamba-like mixers share.

Gu & Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, Algorithm 2; Liu et al., "VMamba:
Visual State Space Model", NeurIPS 2024, section 4.2.
"""
import math
from typing import Sequence

import torch
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...kernels import selective_scan
from .eos_linear import WideModule, wide


class StepProjection(nn.Module):
    """A linear layer for each path, without bias: (T, P, R) -> (T, P, C)."""

    def __init__(self, paths: int, rank: int, channels: int, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(paths, channels, rank, device=device, dtype=dtype))
        nn.init.uniform_(self.weight, -rank ** -0.5, rank ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight.mT).transpose(0, 1)


@register_notrace_module
class SelectiveScan(WideModule):
    """Selective scans along paths over a grid, whose outputs are added: (B, H, W, C) -> (B, H, W, C).

    For each path, with u the input of a token:

        r, b, c = split(x_proj u),   step = softplus(dt_proj r + dt_bias)
        h_t = exp(-step exp(A_log)) h_{t-1} + step b_t u_t,   y_t = c_t' h_t + D u_t

    A_log, D and dt_bias, the steps, the decays and the states stay in float32.

    Args:
        dim: number C of channels.
        states: number N of states of a channel.
        rank: width R of the steps before their projection.
        paths: names of paths, see `kernels.selective_scan`.
        bias_factor: what dt_bias is multiplied by where it is added; 2 in MambaVision, which adds it twice.
        device, dtype: of the linear layers.

    Attributes:
        x_proj: weight (P (R + 2 N), C): r, b and c of the first path, then those of the next one.
        dt_proj: weight (P, C, R).
        dt_bias, D: (P, C).
        A_log: (P, C, N).
    """

    def __init__(self, dim: int, states: int, rank: int, paths: Sequence[str] = ('right',), bias_factor: int = 1,
                 device=None, dtype=None):
        super().__init__()
        dd, own = {'device': device, 'dtype': dtype}, wide(device, dtype)
        self.bounds, self.paths, self.bias_factor = (rank, rank + states), tuple(paths), bias_factor
        count = len(self.paths)
        self.x_proj = nn.Linear(dim, count * (rank + 2 * states), bias=False, **dd)
        self.dt_proj = StepProjection(count, rank, dim, **dd)
        self.dt_bias = nn.Parameter(torch.empty(count, dim, **own))
        self.A_log = nn.Parameter(torch.empty(count, dim, states, **own))
        self.D = nn.Parameter(torch.empty(count, dim, **own))
        self.reset_parameters()

    def reset_parameters(self, least: float = 1e-3, most: float = 0.1, floor: float = 1e-4) -> None:
        """Initialize rates to 1..N, D to 1, and biases so that the steps are log-uniform in [least, most]."""
        with torch.no_grad():
            step = self.dt_bias.uniform_(math.log(least), math.log(most)).exp_().clamp_(min=floor)
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))                      # the inverse of softplus
            self.A_log.copy_(torch.arange(1., self.A_log.shape[2] + 1).log())
            self.D.fill_(1)

    def forward(self, u: Tensor) -> Tensor:
        # Runtimes of phones take rank 4, so that tokens have one dimension until the operator reads them.
        r, b, c = self.x_proj(u).flatten(0, -2).unflatten(-1, (len(self.paths), -1)).tensor_split(self.bounds, -1)
        step, b, c = (x.to(u.dtype).unflatten(0, u.shape[:-1])                               # autocast narrows them
                      for x in (self.dt_proj(r), b, c))
        bias = self.bias_factor * self.dt_bias
        return selective_scan(u, step, -self.A_log.exp(), b, c, self.D, bias, paths=self.paths)
