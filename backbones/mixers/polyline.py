"""Polyline path masked attention (PPMA): all of its attentions and all masks of its ablation, in one token mixer.

Zhao et al., "Polyline Path Masked Attention for Vision Transformer", NeurIPS 2025, and the published code. They differ:
the code adds the logarithm of the mask to the logits (`mask_mode='additive'`, with which the published weights were
trained), and the paper multiplies the softmax by the mask (`mask_mode='multiplicative'`). The default follows the code.
"""
import math
from typing import Annotated, Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...kernels import (
    crisscross_attention,
    decay_attention,
    polyline_attention,
    polyline_linear_attention,
    rotary_embedding,
)
from ...kernels.common.checks import MASK_MODES
from ..blocks import DepthwiseConv
from ..options import Flag, checked, one_of

PATHS = ('both', 'v2h', 'cross_scan', 'rmt', 'none')


# The functions `attend_*` map q, k, v (B, heads, H * W, D) and step logs (B, heads, H, W) to
# (B, heads, H * W, D).

def attend_full(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                paths: str) -> Tensor:
    """Softmax attention between all tokens (PPMVA)."""
    if paths == 'none':
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)
    if paths == 'cross_scan':
        def along_lines(q, k, v, log_decay):
            return decay_attention(q, k, v, log_decay, mask_mode=mask_mode)
        y = _sum_of_scans(along_lines, q, k, v, log_alpha, log_beta)
        return y * (0.5 if mask_mode == 'additive' else 1.0)
    paths = 'both' if paths == 'both' else 'v2h'         # for 'rmt' the V2H mask equals the H2V mask
    return polyline_attention(q, k, v, log_alpha, log_beta, mask_mode=mask_mode, paths=paths)


def attend_crisscross(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                      paths: str) -> Tensor:
    """Softmax attention along columns and along rows (PPMCCA): RMT goes along rows first."""
    mask_mode = 'additive' if paths == 'none' else mask_mode
    paths = {'cross_scan': 'both', 'rmt': 'h2v', 'none': 'v2h'}.get(paths, paths)
    return crisscross_attention(q, k, v, log_alpha, log_beta, mask_mode=mask_mode, paths=paths)


def attend_linear(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                  paths: str) -> Tensor:
    """Normalized linear attention with the feature map elu + 1 (PPMLA). `mask_mode` has no effect."""
    v = torch.cat((v, torch.ones_like(v[..., :1])), -1)            # the last channel sums the weights
    y = _masked_linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, log_alpha, log_beta, paths)
    return y[..., :-1] / y[..., -1:]


def attend_decomposed(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                      paths: str) -> Tensor:
    """Softmax attention to and from 16 pooled queries (PPMDA). `mask_mode` has no effect."""
    grid = q.flatten(0, 1).transpose(1, 2).unflatten(2, log_alpha.shape[2:])         # (B * heads, D, H, W)
    agents = F.adaptive_avg_pool2d(grid, 4).flatten(2).unflatten(0, q.shape[:2])     # (B, heads, D, 16)
    to_agents = ((q * q.shape[-1] ** -0.5) @ agents).softmax(-1)                     # S1: (B, heads, N, 16)
    from_tokens = (k @ agents).softmax(-2)                                           # S2', over the tokens
    return _masked_linear_attention(to_agents, from_tokens, v, log_alpha, log_beta, paths)


def _masked_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: str
                             ) -> Tensor:
    """(q k' * mask) v without softmax."""
    if paths == 'cross_scan':
        def along_lines(q, k, v, log_decay):
            return polyline_linear_attention(q, k, v, log_decay, log_decay, paths='v2h')
        return _sum_of_scans(along_lines, q, k, v, log_alpha, log_beta)
    paths = 'both' if paths == 'both' else 'v2h'
    q, k, v = (x.unflatten(2, log_alpha.shape[2:]) for x in (q, k, v))
    return polyline_linear_attention(q, k, v, log_alpha, log_beta, paths=paths).flatten(2, 3)


def _sum_of_scans(attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor,
                  log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """Sum of `attend` along the grid read row by row (`log_alpha`) and read column by column (`log_beta`)."""
    height, width = log_alpha.shape[2:]

    def scan(tensors: Sequence[Tensor], log_decay: Tensor) -> Tensor:
        return attend(*(x.unsqueeze(2) for x in tensors), log_decay.flatten(2).unsqueeze(2)).squeeze(2)

    def transpose_grid(x: Tensor, rows: int, columns: int) -> Tensor:
        """Reorder tokens (B, heads, rows * columns, D) from row by row to column by column."""
        batch, heads, tokens, dim = x.shape
        x = x.reshape(batch * heads, rows, columns, dim).transpose(1, 2)
        return x.reshape(batch, heads, tokens, dim)

    by_columns = scan([transpose_grid(x, height, width) for x in (q, k, v)], log_beta.transpose(2, 3))
    return scan((q, k, v), log_alpha) + transpose_grid(by_columns, width, height)


# The attentions by the value of the option `attention`.
ATTENTIONS: Dict[str, Callable[..., Tensor]] = {
    'full': attend_full,
    'crisscross': attend_crisscross,
    'linear': attend_linear,
    'decomposed': attend_decomposed,
}


def manhattan_decay(num_heads: int, decay_range: float, device: Any = None) -> Tensor:
    """Return RMT's step logs (heads,): head h of n decays by 1 - 2^(-2 - range * h / n) per step (section 3.2)."""
    head = torch.arange(num_heads, device=device, dtype=torch.float32)
    return torch.log1p(-2.0 ** (-2 - decay_range * head / num_heads))


class PathDecay(nn.Module):
    """Step logs of every token and head from the mixer's input: log_alpha (horizontal) and log_beta (vertical), <= 0.

    log_alpha = -exp(A_log) * softplus(w_alpha . x_head + dt_bias), and log_beta likewise with w_beta. `A_log` and
    `dt_bias` have one entry for each head. w_alpha and w_beta are the rows of one Linear that all heads share. With
    `shared`, log_beta = log_alpha.
    """

    def __init__(
            self,
            head_dim: int,
            num_heads: int,
            shared: bool = False,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.A_log = nn.Parameter(torch.empty(num_heads, **dd))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, **dd))
        self.proj = nn.Linear(head_dim, 1 if shared else 2, bias=False, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A from U(1, 1.1), and softplus(dt_bias) log-uniformly from [1e-3, 1e-1]."""
        with torch.no_grad():
            self.A_log.uniform_(1, 1.1).log_()
            dt = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
            dt.add_(torch.log(-torch.expm1(-dt)))          # the inverse of softplus

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Return log_alpha and log_beta, (B, heads, H, W) each, for x (B, H, W, C)."""
        batch, height, width, dim = x.shape
        x = x.reshape(batch, height * width, self.num_heads, dim // self.num_heads)
        x = self.proj(x)                                                                 # (B, N, heads, 1 or 2)
        x = x.permute(0, 3, 2, 1).contiguous()                                           # (B, 1 or 2, heads, N)
        logs = F.softplus(x + self.dt_bias[:, None]) * -self.A_log.exp()[:, None]
        grid = batch, self.num_heads, height, width
        return logs[:, 0].reshape(grid), logs[:, -1].reshape(grid)


@register_notrace_module
class PolylineMixer(nn.Module):
    """Polyline path masked attention with rotary embedding and a locally enhanced value (LePE): (B, H, W, C) -> same.

    Args:
        dim: channels C; heads are contiguous slices of C.
        num_heads: number of heads; C / num_heads must be even.
        attention: 'full' (PPMVA), 'crisscross' (PPMCCA), 'linear' (PPMLA: normalized, with the feature map elu + 1) or
            'decomposed' (PPMDA: softmax attention to and from 16 pooled queries). The last two always multiply by the
            mask and have no rotary embedding.
        mask_mode: 'additive' (the published weights) or 'multiplicative' (the paper).
        paths: the decay mask (Table 9): 'both' (V2H + H2V), 'v2h', 'cross_scan' (decay along the raster order of rows
            and of columns; for criss-cross attention, which works on single lines, the same as 'both'), 'rmt' (the
            fixed Manhattan decay of RMT, which criss-cross attention applies along rows first) or 'none'.
        shared_decay: alpha = beta, from a Linear(head_dim, 1).
        lepe_kernel: kernel size of the depthwise convolution of the values.
        rmt_range: with paths='rmt', head h of n decays by 1 - 2^(-2 - rmt_range * h / n) per step.
        device, dtype: device and dtype of the parameters.

    Attributes:
        decay_scale: the step logs are divided by this; `subquad.set_decay_scale` sets it.

    Raises:
        ValueError: the value of an option or a size is not allowed.
    """

    decay_scale = 1.0

    @checked
    def __init__(
            self,
            dim: int,
            num_heads: int,
            attention: Annotated[str, one_of(*ATTENTIONS)] = 'full',
            mask_mode: Annotated[str, one_of(*MASK_MODES)] = 'additive',
            paths: Annotated[str, one_of(*PATHS)] = 'both',
            shared_decay: Flag = False,
            lepe_kernel: int = 5,
            rmt_range: float = 4.0,
            device=None,
            dtype=None,
    ):
        super().__init__()
        if num_heads < 1 or dim % num_heads or dim // num_heads % 2:
            raise ValueError(f'dim / num_heads must be an even integer, got dim={dim}, num_heads={num_heads}')
        dd = {'device': device, 'dtype': dtype}
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.attention, self.mask_mode, self.paths, self.rmt_range = attention, mask_mode, paths, rmt_range
        self.q, self.k, self.v = (nn.Linear(dim, dim, **dd) for _ in range(3))
        self.decay = PathDecay(self.head_dim, num_heads, shared_decay, **dd) if paths not in ('rmt', 'none') else None
        self.lepe = DepthwiseConv(dim, lepe_kernel, **dd)
        self.out = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = self.v(x), self.q(x), self.k(x)
        y = self.attend(q, k, v, *self.decay_logs(x)).transpose(1, 2)             # (B, N, heads, D)
        return self.out(self.lepe(v, y.reshape(x.shape)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
        """Return masked attention, (B, heads, N, D), of q, k, v (B, H, W, C) under step logs (B, heads, H, W)."""
        q, k = self.queries_and_keys(q, k)
        return ATTENTIONS[self.attention](
            q, k, self._split_heads(v), log_alpha, log_beta, self.mask_mode, self.paths)

    def decay_logs(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Return the step logs for the mixer's input x (B, H, W, C).

        Returns:
            log_alpha (horizontal) and log_beta (vertical), (B, heads, H, W) each.
        """
        if self.decay is not None:
            return self.scaled(*self.decay(x))
        logs = x.new_zeros(1)
        if self.paths == 'rmt':
            logs = manhattan_decay(self.num_heads, self.rmt_range, x.device)[:, None, None].to(x.dtype)
        logs = logs.expand(x.shape[0], self.num_heads, *x.shape[1:3])
        return self.scaled(logs, logs)

    def scaled(self, log_alpha: Tensor, log_beta: Tensor) -> Tuple[Tensor, Tensor]:
        """Divide step logs by the scale."""
        scale = self.decay_scale
        return (log_alpha, log_beta) if scale == 1 else (log_alpha / scale, log_beta / scale)

    def why_not_scale(self, scale: float) -> Optional[str]:
        """Return why `decay_scale` cannot be this, or None."""
        if self.paths == 'none':
            return "paths='none' has no decay"
        flat = self.paths == 'cross_scan' and self.attention != 'crisscross'
        return "with paths='cross_scan', a step of one row passes all tokens of a row" if flat else None

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, heads, N, D), a view."""
        batch, height, width, _ = x.shape                # no size is -1, which an empty batch leaves open
        return x.reshape(batch, height * width, self.num_heads, self.head_dim).transpose(1, 2)

    def queries_and_keys(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
        """Split q and k (B, H, W, C) into heads, (B, heads, N, D), with k scaled by head_dim^-1/2.

        Softmax attention rotates them by the index of their token. Linear and decomposed
        attention do not.
        """
        scale = self.head_dim ** -0.5
        q, k = self._split_heads(q), self._split_heads(k)
        if self.attention in ('linear', 'decomposed'):
            return q, k * scale
        return rotary_embedding(q, k, scale=scale)
