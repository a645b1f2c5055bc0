"""The native attentions of PPMA, with rotary embedding and step logs computed inside."""
from struct import Struct
from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.checks import PATHS
from ..common.declare import node
from ..common.launch import token_major
from . import DONE, function

WIDEST_HEAD = 512
# `struct Attention` of attention.h.
_ARGUMENTS = Struct('9Q6q3q3q3q3q4q4q4qd')


def native_attention(op: str, portable: Callable[..., Tensor], flops: Callable[..., int]) -> Any:
    """Register the native node of an attention, and return it.

    Args:
        op: 'polyline_attention' or 'crisscross_attention'.
        portable: computes the same from rotated queries and keys and from step logs. It runs where sums of
            exponentials leave the range of numbers, where memory ends, and for heads wider than 512.
        flops: as for `node`.
    """
    def run(q, k, v, log_alpha, log_beta, mask_mode, paths, table=None, scale=1.0, bias=None, rate=None) -> Tensor:
        y = _attend(op, q, k, v, log_alpha, log_beta, mask_mode, paths, table, scale, bias, rate)
        if y is not None:
            return y
        if rate is not None:
            log_alpha, log_beta = (F.softplus(x + bias[:, None, None]) * -rate[:, None, None]
                                   for x in (log_alpha, log_beta))
        if table is not None:
            q, k = _rotated(q, table), _rotated(k, table)
        return portable(q, k * scale, v, log_alpha, log_beta, mask_mode, paths)

    @node(f'{op}_native_fwd', run, flops)
    def forward(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str,
                table: Optional[Tensor] = None, scale: float = 1.0, bias: Optional[Tensor] = None,
                rate: Optional[Tensor] = None) -> Tensor:
        """Return the attention of q and k that are rotated by a table, with k multiplied by `scale`.

        q, k: (B, heads, H, W, D), v: (B, heads, H, W, Dv); float32 or bfloat16, any strides. log_alpha, log_beta:
        (B, heads, H, W), any strides. table: (N, D / 2, 2) in float32. With `rate` and `bias`, (heads,) in float32,
        the step logs are -rate softplus(x + bias) of what is given. The heads of a token of the result lie side by
        side.
        """
        return token_major(v.shape, v)
    return forward


def _attend(op: str, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str,
            table: Optional[Tensor], scale: float, bias: Optional[Tensor], rate: Optional[Tensor]) -> Optional[Tensor]:
    if max(q.shape[-1], v.shape[-1]) > WIDEST_HEAD:
        return None
    q, k, v, log_alpha, log_beta = _tokens(q), _tokens(k), _tokens(v), log_alpha.float(), log_beta.float()
    y = token_major(v.shape, v)
    batch, heads, height, width, dim = q.shape
    arguments = _ARGUMENTS.pack(
        *(x.data_ptr() for x in (q, k, v, y, log_alpha, log_beta)),
        *(0 if x is None else x.data_ptr() for x in (table, bias, rate)),
        batch, heads, height, width, dim, v.shape[-1],
        *_strides(q), *_strides(k), *_strides(v), *_strides(y), *log_alpha.stride(), *log_beta.stride(),
        q.dtype == torch.bfloat16, mask_mode == 'multiplicative', PATHS.index(paths), torch.get_num_threads(), scale)
    return y if function(op)(arguments) == DONE else None


def _tokens(x: Tensor) -> Tensor:
    """Return x (B, heads, H, W, D), as a copy unless its channels are dense and all its tokens have one stride."""
    _, _, row, column, channel = x.stride()
    _, _, height, width, dim = x.shape
    dense = (channel == 1 or dim == 1) and (height == 1 or width == 1 or row == width * column)
    return x if dense else x.contiguous()


def _strides(x: Tensor) -> Tuple[int, int, int]:
    """Return the strides of images, heads and tokens."""
    batch, head, row, column, _ = x.stride()
    return batch, head, column if x.shape[3] > 1 else row


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = table.unflatten(0, x.shape[2:4]).unbind(-1)
    return torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1).flatten(-2).to(x.dtype)
