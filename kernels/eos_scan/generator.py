"""Oscillation states of full rank that are computed inside of the time loop, from a factor per token and a weight."""
import math
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import STEP_LOG_MIN

GENERATOR_FORMS = ('sigmoid', 'exponential')


class DecayGenerator(NamedTuple):
    """A decay o (T, K, D) of full rank, described by its factors, so that no tensor of this size has to exist.

    With u[t, k, d] = z[t, k] weight[k, d] (axis='k') or z[t, d] weight[k, d] (axis='d'):

        form='sigmoid':      o = sigmoid(u) ** (1 / tau)    types 6 to 9 of the paper's Table 3
        form='exponential':  o = exp(-u)                    Mamba, with z = delta and weight = exp(log A)

    Attributes:
        z: shape (B, H, T, K) for axis='k', (B, H, T, D) for axis='d'.
        weight: shape (H, K, D); K or D may be 1, for a weight that is the same along that axis.
        axis: 'k' or 'd', the axis of the memory that z belongs to.
        form: 'sigmoid' or 'exponential'. For 'exponential', z * weight must not be negative.
        tau: temperature of 'sigmoid', > 0.
    """

    z: Tensor
    weight: Tensor
    axis: str
    form: str = 'sigmoid'
    tau: float = 16.0


def generated_logs(z: Tensor, weight: Tensor, form: str, tau: float) -> Tensor:
    """Return log o = log(sigmoid(z weight)) / tau or -z weight, for z and weight that broadcast."""
    u = z * weight
    return F.logsigmoid(u).mul_(1 / tau) if form == 'sigmoid' else -u


def generated_slope(z: Tensor, weight: Tensor, form: str, tau: float) -> Tensor:
    """Return the derivative of `generated_logs` with respect to z weight, zero where step logs are clamped."""
    u = z * weight
    if form == 'exponential':
        return ((u >= 0) & (u <= -STEP_LOG_MIN)).to(u.dtype).neg_()
    # log(sigmoid(u)) / tau = STEP_LOG_MIN at this u.
    width = -STEP_LOG_MIN * tau
    least = -width if width > 40 else -math.log(math.expm1(width))
    clamped = u < least
    return u.neg_().sigmoid_().mul_(1 / tau).masked_fill_(clamped, 0.0)
