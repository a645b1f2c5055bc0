"""Triton functions that kernels share: loads of tiles, products, running softmaxes. Import late: this imports Triton.

Inside kernels, logits and log masks are in units of log 2 (scaled by log2 e), because the hardware computes 2^x.
"""
import torch
import triton
import triton.language as tl

from . import launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float('inf'))


@triton.jit
def load_tokens(pointer, index, stride, limit, DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """Load tokens `index` < limit, and zeros for the others, of the line at `pointer`: (len(index), BLOCK_D).

    UPCAST to float32 is for Triton's interpreter, whose products of bfloat16 are wrong."""
    d = tl.arange(0, BLOCK_D)
    x = tl.load(pointer + index[:, None] * stride + d[None, :], mask=(index < limit)[:, None] & (d < DIM)[None, :],
                other=0.0)
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def store_tokens(pointer, index, stride, limit, x, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store what `load_tokens` would load, in the dtype of the pointer."""
    d = tl.arange(0, BLOCK_D)
    tl.store(pointer + index[:, None] * stride + d[None, :], x.to(pointer.dtype.element_ty),
             mask=(index < limit)[:, None] & (d < DIM)[None, :])


@triton.jit
def dot(x, y, PRECISION: tl.constexpr):
    """Multiply x, cast to the dtype of y, and y; accumulate in float32."""
    return tl.dot(x.to(y.dtype), y, input_precision=PRECISION)


@triton.jit
def gelu(x):
    """Return x times the normal distribution function of x."""
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def index_sign(x, y):
    """Return sign(x - y) of indices in float32."""
    return (x > y).to(tl.float32) - (x < y).to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + e^x), by log(1 + t) = t log(w) / (w - 1) with w = 1 + t rounded, which is exact for small t, too."""
    t = tl.exp2(-tl.abs(x) * LOG2E)
    w = 1 + t
    return tl.maximum(x, 0.0) + tl.where(w == 1, t, tl.log2(w) * LN2 * (t / tl.where(w == 1, 1.0, w - 1)))


@triton.jit
def running_softmax(logits, values, top, total, y, PRECISION: tl.constexpr):
    """Add a tile of logits (M, N), in units of log 2, and values (N, D) to a running softmax.

    `top` (M,) is the maximum, `total` (M,) the sum of exponentials and `y` (M, D) the weighted sum of values so far.
    Returns the three after the tile."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    scale = tl.exp2(top - new_top)
    p = tl.exp2(logits - new_top[:, None])
    return new_top, total * scale + tl.sum(p, 1), y * scale[:, None] + dot(p, values, PRECISION)


@triton.jit(do_not_specialize=('second', 'tokens', 'heads'))
def _row_products_kernel(x, y, z, out, second, tokens, heads, dim, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out[0] = sum_d x y and, if `second`, out[1] = sum_d x (2 z - y), for each token.

    x, y, z: (B, N, heads, dim) in memory; out: (1 or 2, B, heads, N)."""
    blocks = tl.cdiv(tokens, BLOCK)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    # 64 bits: an image may span 2^31 elements.
    token = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    at = ((group // heads * tokens + token) * heads + group % heads)[:, None] * dim + d[None, :]
    inside = (token < tokens)[:, None] & (d < dim)[None, :]
    gradient = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    result = tl.sum(gradient * tl.load(y + at, mask=inside, other=0.0).to(tl.float32), 1)
    out += group * tokens
    tl.store(out + token, result, mask=token < tokens)
    if second:
        mean = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        groups = tl.num_programs(0) // blocks
        tl.store(out + groups.to(tl.int64) * tokens + token, 2 * tl.sum(gradient * mean, 1) - result,
                 mask=token < tokens)


def row_products(grad, first, mean=None):
    """Return sum_d grad * first and, if `mean` is the mean of first and second, sum_d grad * second as well.

    All tensors are (B, heads, H, W, D) in the memory order of `launch.token_major`. The result is float32, of shape
    (1 or 2, B, heads, N)."""
    batch, heads, height, width, dim = grad.shape
    tokens, side, second = height * width, 32, int(mean is not None)
    result = torch.empty(1 + second, batch, heads, tokens, dtype=torch.float32, device=grad.device)
    # One kernel for heads of up to 32 channels, which all stages of a network have.
    _row_products_kernel[launch.programs(batch * heads * launch.cdiv(tokens, side))](
        grad, first, mean if second else grad, result, second, tokens, heads, dim,
        BLOCK_D=max(32, launch.padded_power_of_two(dim)), BLOCK=side, num_warps=2)
    return result
