"""The native attentions of PPMA: of inference, with rotary embedding and step logs computed inside, and of training."""
from struct import Struct
from typing import Any, Callable, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.checks import PATHS
from ..common.declare import differentiate, node
from ..common.launch import token_major
from ..common.numerics import needs_gradient
from . import DONE, function

WIDEST_HEAD = 512
# `struct Attention` and `struct Training` of attention.h.
_ARGUMENTS = Struct('9Q6q3q3q3q3q4q4q4qd')
_TRAINING = Struct('12Q7q')


def native_attention(op: str, portable: Any, run_portable: Callable[..., Tensor], flops: Callable[..., int],
                     backward_flops: Callable[..., int]) -> Tuple[Any, Callable[..., Tensor]]:
    """Register the native nodes of an attention.

    PyTorch takes over where sums of exponentials leave the range of numbers, where memory ends, for heads wider than
    512, and for gradients in multiplicative mode.

    Args:
        op: 'polyline_attention' or 'crisscross_attention'.
        portable: the module with `forward` and `backward` of the portable nodes.
        run_portable: the portable implementation, whose last argument is the node that it calls.
        flops, backward_flops: as for `node`.

    Returns:
        The node of inference, which also rotates and computes step logs, and the implementation of the operator.
    """
    inference, training = _inference(op, run_portable, flops), _training(op, portable, flops, backward_flops)

    def implementation(*arguments) -> Tensor:
        *tensors, mask_mode, _ = arguments
        if not (torch.is_grad_enabled() and needs_gradient(*tensors)):
            return inference(*arguments)
        return run_portable(*arguments, training) if mask_mode == 'additive' else run_portable(*arguments)
    return inference, implementation


def _inference(op: str, run_portable: Callable[..., Tensor], flops: Callable[..., int]) -> Any:
    def run(q, k, v, log_alpha, log_beta, mask_mode, paths, table=None, scale=1.0, bias=None, rate=None) -> Tensor:
        y = _attend(op, q, k, v, log_alpha, log_beta, mask_mode, paths, table, scale, bias, rate)
        if y is not None:
            return y
        if rate is not None:
            log_alpha, log_beta = (F.softplus(x + bias[:, None, None]) * -rate[:, None, None]
                                   for x in (log_alpha, log_beta))
        if table is not None:
            q, k = _rotated(q, table), _rotated(k, table)
        return run_portable(q, k * scale, v, log_alpha, log_beta, mask_mode, paths)

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


def _training(op: str, portable: Any, flops: Callable[..., int], backward_flops: Callable[..., int]) -> Any:
    def call(tensors: Sequence[Optional[Tensor]], inputs: Sequence[Tensor], paths: str) -> bool:
        if max(inputs[0].shape[-1], inputs[2].shape[-1]) > WIDEST_HEAD:
            return False
        arguments = _TRAINING.pack(*(0 if x is None else x.data_ptr() for x in tensors), *inputs[0].shape,
                                   inputs[2].shape[-1], PATHS.index(paths), torch.get_num_threads())
        return function(f'{op}_training')(arguments) == DONE

    def run_forward(*args) -> Tensor:
        *inputs, _, paths = args
        y = torch.empty_like(inputs[2])
        return y if call([None, *inputs, y, *[None] * 5], inputs, paths) else portable.forward(*args)

    def run_backward(*args) -> Tuple[Tensor, ...]:
        grad, *inputs, _, paths = args
        grads = tuple(torch.empty_like(x) for x in inputs)
        return grads if call([grad, *inputs, None, *grads], inputs, paths) else portable.backward(*args)

    @node(f'{op}_native_training_fwd', run_forward, flops)
    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, mask_mode: str, paths: str) -> Tensor:
        """q, k: (G, H, W, D), v: (G, H, W, Dv), a and b: what the operator makes of the step logs; dense float32."""
        return torch.empty_like(v)

    @node(f'{op}_native_training_bwd', run_backward, backward_flops)
    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, mask_mode: str, paths: str
                 ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return tuple(torch.empty_like(x) for x in (q, k, v, a, b))

    differentiate(forward, lambda grad, *saved: backward(grad.contiguous(), *saved))
    return forward


def _attend(op: str, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str,
            table: Optional[Tensor], scale: float, bias: Optional[Tensor], rate: Optional[Tensor]) -> Optional[Tensor]:
    batch, heads, height, width, dim = q.shape
    value_dim = v.shape[-1]
    if max(dim, value_dim) > WIDEST_HEAD:
        return None
    (q, *q_strides), (k, *k_strides), (v, *v_strides) = _tokens(q), _tokens(k), _tokens(v)
    log_alpha, log_beta = log_alpha.float(), log_beta.float()
    y = v.new_empty(batch, height, width, heads, value_dim)
    arguments = _ARGUMENTS.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), y.data_ptr(), log_alpha.data_ptr(), log_beta.data_ptr(),
        0 if table is None else table.data_ptr(), 0 if bias is None else bias.data_ptr(),
        0 if rate is None else rate.data_ptr(), batch, heads, height, width, dim, value_dim,
        *q_strides, *k_strides, *v_strides, y.stride(0), y.stride(3), y.stride(2),
        *log_alpha.stride(), *log_beta.stride(),
        q.dtype == torch.bfloat16, mask_mode == 'multiplicative', PATHS.index(paths), torch.get_num_threads(), scale)
    return y.permute(0, 3, 1, 2, 4) if function(op)(arguments) == DONE else None


def _tokens(x: Tensor) -> Tuple[Tensor, int, int, int]:
    """Return x (B, heads, H, W, D) and its strides of images, heads and tokens. It is a copy unless its channels are
    dense and all its tokens have one stride."""
    _, _, height, width, dim = x.shape
    batch, head, row, column, channel = x.stride()
    if channel != 1 and dim > 1 or row != width * column and height > 1 and width > 1:
        return _tokens(x.contiguous())
    return x, batch, head, column if width > 1 else row


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = table.unflatten(0, x.shape[2:4]).unbind(-1)
    return torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1).flatten(-2).to(x.dtype)
