"""Polyline path masked attention (PPMA), all its attentions and the masks of its ablation, as one token mixer.

Zhao et al., "Polyline Path Masked Attention for Vision Transformer", NeurIPS 2025, and the published code. The two
differ: the code adds the logarithm of the mask to the logits (`mask='logit'`, what the published weights were trained
with), the paper multiplies the softmax by the mask (`mask='product'`). The default is the code's.
"""
import math
from typing import Callable, ClassVar, Tuple

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...kernels import crisscross_attention, decay_attention, polyline_attention, polyline_linear_attention
from ...kernels.common.tracing import exporting
from ..blocks import DepthwiseConv
from ..options import Options, check, flag, one_of
from .rotary import rotary_angles, rotate, rotate_flat

ATTENTIONS = ('full', 'crisscross', 'linear', 'decomposed')
MASKS = ('logit', 'product')
PATHS = ('2d', 'v2h', 'cross_scan', 'rmt', 'none')


class PathDecay(nn.Module):
    """Step logs of every token and head from the mixer's input: log alpha (horizontal) and log beta (vertical), <= 0.

    a = -exp(A_log) * softplus(w_alpha . x_head + dt_bias), b likewise with w_beta; `A_log` and `dt_bias` are per head,
    w_alpha and w_beta are the rows of one Linear that all heads share. With `shared`, b = a."""

    def __init__(self, head_dim: int, num_heads: int, shared: bool = False, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.A_log = nn.Parameter(torch.empty(num_heads, **dd))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, **dd))
        self.proj = nn.Linear(head_dim, 1 if shared else 2, bias=False, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A ~ U(1, 1.1); softplus(dt_bias) log-uniform in [1e-3, 1e-1]."""
        with torch.no_grad():
            self.A_log.uniform_(1, 1.1).log_()
            dt = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
            dt.add_(torch.log(-torch.expm1(-dt)))          # the inverse of softplus

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """(B, H, W, C) -> a, b: (B, heads, H, W) each."""
        batch, height, width, _ = x.shape
        x = self.proj(x.reshape(batch, height * width, self.num_heads, -1))              # (B, N, heads, 1 or 2)
        x = x.permute(3, 0, 2, 1).contiguous()                                           # (1 or 2, B, heads, N)
        steps = F.softplus(x + self.dt_bias[:, None]) * -self.A_log.exp()[:, None]
        a, b = (steps[n].reshape(batch, self.num_heads, height, width) for n in (0, -1))
        return a, b


@register_notrace_module
class PolylineMixer(nn.Module):
    """Polyline path masked attention with rotary embedding and a locally enhanced value (LePE): (B, H, W, C) -> same.

    Args:
        dim: channels C; heads are contiguous slices of C.
        num_heads: number of heads; C / num_heads must be even.
        attention: 'full' (PPMVA), 'crisscross' (PPMCCA), 'linear' (PPMLA: phi = elu + 1, normalised) or 'decomposed'
            (PPMDA: softmax attention to and from 16 pooled queries). The last two multiply by the mask whatever
            `mask` says, and have no rotary embedding.
        mask: 'logit' (published weights) or 'product' (paper).
        paths: which decay mask (Table 9): '2d' (V2H + H2V), 'v2h', 'cross_scan' (decay along the raster order of rows
            and of columns; in criss-cross attention, where a line is all there is, the same as '2d'), 'rmt' (RMT's
            fixed Manhattan decay) or 'none'.
        shared_decay: alpha = beta, from a Linear(head_dim, 1).
        lepe_kernel: size of the depthwise convolution of the values.
        rmt_range: with paths='rmt', head h of n decays by 1 - 2^(-2 - rmt_range * h / n) per step.
        device, dtype: of the parameters.

    Raises:
        ValueError: a name or a size that does not fit.
    """

    OPTIONS: ClassVar[Options] = {'attention': one_of(*ATTENTIONS), 'mask': one_of(*MASKS), 'paths': one_of(*PATHS),
                                  'shared_decay': flag()}

    def __init__(self, dim: int, num_heads: int, attention: str = 'full', mask: str = 'logit', paths: str = '2d',
                 shared_decay: bool = False, lepe_kernel: int = 5, rmt_range: float = 4.0, device=None, dtype=None):
        super().__init__()
        check('PolylineMixer', self.OPTIONS, dict(attention=attention, mask=mask, paths=paths,
                                                  shared_decay=shared_decay))
        if num_heads < 1 or dim % num_heads or dim // num_heads % 2:
            raise ValueError(f'dim / num_heads must be an even integer, got dim={dim}, num_heads={num_heads}')
        dd = {'device': device, 'dtype': dtype}
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.attention, self.mask, self.paths, self.rmt_range = attention, mask, paths, rmt_range
        self.q, self.k, self.v = (nn.Linear(dim, dim, **dd) for _ in range(3))
        self.decay = PathDecay(self.head_dim, num_heads, shared_decay, **dd) if paths not in ('rmt', 'none') else None
        self.lepe = DepthwiseConv(dim, lepe_kernel, **dd)
        self.out = nn.Linear(dim, dim, **dd)
        self.exportable = is_exportable()

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        v = self.v(x)
        export = self.exportable or exporting()
        q, k = self._queries_and_keys(x, export)
        a, b = self.decay_logs(x)
        y = getattr(self, f'_{self.attention}')(q, k, self._heads(v), a, b, 'export' if export else 'auto')
        y = y.transpose(1, 2)                                                            # (B, N, heads, D)
        y = self.lepe(v).reshape(y.shape) + y
        return self.out(y.reshape(batch, height, width, dim))

    def decay_logs(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Step logs a (horizontal) and b (vertical), (B, heads, H, W) each, from the mixer's input (B, H, W, C)."""
        if self.decay is not None:
            return self.decay(x)
        logs = x.new_zeros(x.shape[0], self.num_heads, *x.shape[1:3])
        if self.paths == 'rmt':
            head = torch.arange(self.num_heads, device=x.device, dtype=torch.float32)[:, None, None]
            logs = logs + torch.log1p(-2.0 ** (-2 - self.rmt_range * head / self.num_heads)).to(x.dtype)
        return logs, logs

    def _heads(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, heads, N, D), a view."""
        return x.reshape(x.shape[0], -1, self.num_heads, self.head_dim).transpose(1, 2)

    def _queries_and_keys(self, x: Tensor, export: bool) -> Tuple[Tensor, Tensor]:
        """Rotated where softmax attention uses them, k scaled by head_dim^-1/2: (B, heads, N, D) each."""
        scale = self.head_dim ** -0.5
        q, k = self._heads(self.q(x)), self._heads(self.k(x))
        if self.attention in ('linear', 'decomposed'):
            k = k * scale
        elif export:
            q, k = rotate_flat(q), rotate_flat(k * scale)
        else:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            q, k = rotate(q, k, rotary_angles(q.shape[2], self.head_dim, x.device, dtype), scale)
        return q, k

    # The attentions: q, k, v (B, heads, N, D) and step logs (B, heads, H, W) -> (B, heads, N, D). Arithmetic stays at
    # rank 4, for exporters; the operators take the grid apart.

    def _full(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, backend: str) -> Tensor:
        if self.paths == 'none':
            return F.scaled_dot_product_attention(q, k, v, scale=1.0)
        if self.paths == 'cross_scan':
            def raster(q, k, v, logs):
                return decay_attention(q, k, v, logs, mask=self.mask, backend=backend)
            return self._both_rasters(raster, q, k, v, a, b) * (0.5 if self.mask == 'logit' else 1.0)
        paths = 'both' if self.paths == '2d' else 'v2h'      # rmt: both masks are equal
        q, k, v = (x.unflatten(2, a.shape[2:]) for x in (q, k, v))
        return polyline_attention(q, k, v, a, b, mask=self.mask, paths=paths, backend=backend).flatten(2, 3)

    def _crisscross(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, backend: str) -> Tensor:
        order = 'both' if self.paths in ('2d', 'cross_scan') else 'column_first'
        mask = 'logit' if self.paths == 'none' else self.mask
        q, k, v = (x.unflatten(2, a.shape[2:]) for x in (q, k, v))
        return crisscross_attention(q, k, v, a, b, mask=mask, order=order, backend=backend).flatten(2, 3)

    def _linear(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, backend: str) -> Tensor:
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)            # the last channel counts the weights
        y = self._scanned(F.elu(q) + 1, F.elu(k) + 1, v, a, b, backend)
        return y[..., :-1] / y[..., -1:]

    def _decomposed(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, backend: str) -> Tensor:
        grid = q.flatten(0, 1).transpose(1, 2).unflatten(2, a.shape[2:])                 # (B * heads, D, H, W)
        agents = F.adaptive_avg_pool2d(grid, 4).flatten(2).unflatten(0, q.shape[:2])     # (B, heads, D, 16)
        to = ((q * self.head_dim ** -0.5) @ agents).softmax(-1)                          # S1: (B, heads, N, 16)
        back = (k @ agents).softmax(-2)                                                  # S2', over the tokens
        return self._scanned(to, back, v, a, b, backend)

    def _scanned(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, backend: str) -> Tensor:
        if self.paths == 'cross_scan':
            def raster(q, k, v, logs):
                return polyline_linear_attention(q, k, v, logs, logs, order='v2h', backend=backend)
            return self._both_rasters(raster, q, k, v, a, b)
        order = 'both' if self.paths == '2d' else 'v2h'
        q, k, v = (x.unflatten(2, a.shape[2:]) for x in (q, k, v))
        return polyline_linear_attention(q, k, v, a, b, order=order, backend=backend).flatten(2, 3)

    @staticmethod
    def _both_rasters(attend: Callable, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The sum of `attend` along the grid read row by row (logs a) and read column by column (logs b)."""
        height, width = a.shape[2:]

        def along(tensors, logs):
            return attend(*(x.unsqueeze(2) for x in tensors), logs.flatten(2).unsqueeze(2)).squeeze(2)

        def turned(x, rows, columns):
            """Tokens (B, heads, rows * columns, D) read the other way."""
            batch, heads, tokens, dim = x.shape
            x = x.reshape(batch * heads, rows, columns, dim).transpose(1, 2)
            return x.reshape(batch, heads, tokens, dim)

        by_columns = along([turned(x, height, width) for x in (q, k, v)], b.transpose(2, 3))
        return along((q, k, v), a) + turned(by_columns, width, height)
