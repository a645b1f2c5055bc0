"""Diagonal state space layer (S5): a recurrence that replaces the tree of `MyoSequence`, as a baseline.

Smith et al., "Simplified State Space Layers for Sequence Modeling", ICLR 2023: eigenvalues of the HiPPO-N matrix, one
step for each state, zero-order hold.
"""
import math
from typing import Optional

import torch
from torch import Tensor, nn

from ...kernels import tree_solve
from ...kernels.common.numerics import without_autocast
from ...kernels.trees import Tree, cached_path
from .eos_linear import WideModule, wide


def hippo_normal_eigenvalues(states: int) -> Tensor:
    """Eigenvalues of the normal part of the HiPPO-LegS matrix of size 2 * states, one of each conjugate pair.

    Returns:
        (states,) complex64, with real parts -1/2, lowest frequency first.
    """
    n = torch.arange(2 * states, dtype=torch.float64)
    product = ((n[:, None] + 0.5) * (n + 0.5)).sqrt()
    skew = product.triu(1) - product.tril(-1)                       # the matrix without its diagonal, -1/2
    frequencies = torch.linalg.eigvals(skew).imag.sort().values[states:]
    return torch.complex(torch.full_like(frequencies, -0.5), frequencies).to(torch.complex64)


class ScanMixer(WideModule):
    """y = 2 Re(C x), x_k = exp(step * eigenvalue) x_k-1 + B u_k, along a sequence (B, L, dim) -> (B, L, dim).

    A second recurrence runs from the end to the start.

    Args:
        dim: channels.
        states: number of complex states.
        device, dtype: device and dtype of the parameters; dtype is float32 or None.

    Raises:
        ValueError: `states` is below 1.
    """

    def __init__(
            self,
            dim: int,
            states: int,
            device=None,
            dtype=None,
    ):
        super().__init__()
        if states < 1:
            raise ValueError(f'states must be at least 1, got {states}')
        dd, own = {'device': device, 'dtype': dtype}, wide(device, dtype)
        self.log_rate = nn.Parameter(torch.empty(states, **own))                 # log of minus the real part
        self.frequency = nn.Parameter(torch.empty(states, **own))
        self.log_step = nn.Parameter(torch.empty(states, **own))
        self.input = nn.Linear(dim, 2 * states, bias=False, **dd)               # real and imaginary parts
        self.output = nn.Linear(4 * states, dim, bias=False, **dd)           # of both directions
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize with the eigenvalues of HiPPO-N and steps log-uniform in [1e-3, 1e-1]."""
        eigenvalues = hippo_normal_eigenvalues(len(self.log_rate))
        with torch.no_grad():
            self.log_rate.copy_((-eigenvalues.real).log())
            self.frequency.copy_(eigenvalues.imag)
            self.log_step.uniform_(math.log(1e-3), math.log(1e-1))

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """Map x (B, L, dim) to the same shape.

        Args:
            x: sequences (B, L, dim).
            mask: (B, L), true for elements and false for padding, where the state only decays; None for no padding.
        """
        with without_autocast(x):                                               # complex numbers need float32
            eigenvalues = torch.complex(-self.log_rate.float().exp(), self.frequency.float())
            decay = (eigenvalues * self.log_step.float().exp()).exp()
            inputs = torch.complex(*nn.functional.linear(x.float(), self.input.weight.float()).chunk(2, -1))
            inputs = inputs * ((decay - 1) / eigenvalues)                       # zero-order hold
            if mask is not None:
                inputs = inputs * mask[..., None]
            states = [self._recurrence(decay, inputs), self._recurrence(decay, inputs.flip(1)).flip(1)]
            parts = [part for state in states for part in (state.real, -state.imag)]
        return 2 * self.output(torch.cat(parts, -1).to(x.dtype))

    @staticmethod
    def _recurrence(decay: Tensor, inputs: Tensor) -> Tensor:
        """States of the recurrence: decay (states,), inputs (B, L, states) -> (B, L, states)."""
        length = int(inputs.shape[1])                                            # in a trace, sizes are tensors
        tree: Tree = cached_path(length)
        c = -decay[:, None, None, None].expand(-1, length, 1, 1)
        u = inputs.transpose(1, 2)[..., None, None]                              # (B, states, L, 1, 1)
        return tree_solve(tree, None, torch.zeros_like(c), c, u)[..., 0, 0].transpose(1, 2)
