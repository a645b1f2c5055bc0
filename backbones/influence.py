"""Influence of all tokens on one token: the row of each mixer's matrix, by one vector-Jacobian product.

A mixer adds up the values of its tokens with coefficients that depend on the image: attention weights, decays, edges or
gates. With these held fixed, its output is linear in the values, y = M v. A backward pass through the operator from one
token of y gives this token's row of M. No N x N matrix is computed.
"""
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import separable_attention
from ..kernels.common.numerics import column_log_decay, row_log_decay
from ..kernels.common.patches import fold_patches, unfold_patches
from .mixers import EosMixer, MultiHeadSelfAttention, PolylineMixer, SeparableSelfAttention, TreeMixer
from .mixers.eos_linear import at_least_float
from .mixers.polyline import ATTENTIONS
from .mixers.separable import SeparableMixer
from .mobilevitv2 import PATCH, MobileViTv2Block, to_even_size
from .observation import check_images, check_model, observe_inputs

__all__ = ['ObservedMixer', 'TokenInfluence', 'attention_without_decay', 'influence', 'mixer_influence',
           'observed_mixers', 'pixel_of', 'polyline_mask', 'token_of']

Token = Tuple[int, int]
Layers = Union[None, str, Sequence[str]]


class TokenInfluence(NamedTuple):
    """The row of a mixer's matrix that belongs to one token.

    Attributes:
        token: row and column of the token on the layer's map.
        weights: how much the output of each head at the token changes with the value of every token, (B, heads, h, w),
            at least float32. Weights can be negative.
    """
    token: Token
    weights: Tensor


def _gradient(mix: Callable[[Tensor], Tensor], values: Tensor, select: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of the sum of `select(mix(values))` with respect to the values."""
    with torch.enable_grad():
        values = values.detach().requires_grad_()
        return torch.autograd.grad(select(mix(values)).sum(), values)[0]


def _polyline(mixer: PolylineMixer, x: Tensor, row: int, column: int,
              logs: Optional[Tuple[Tensor, Tensor]] = None) -> Tensor:
    """Return the row of polyline attention with the mixer's own step logs, or with others."""
    height, width = x.shape[1:3]
    log_alpha, log_beta = logs or (at_least_float(y) for y in mixer.decay_logs(x))
    q, k = (at_least_float(y) for y in mixer.queries_and_keys(mixer.q(x), mixer.k(x)))
    # PyTorch's attention avoids an N x N matrix only if values are as wide as queries. Other operators take any width.
    copies = mixer.head_dim if mixer.attention == 'full' and mixer.paths == 'none' else 1

    def mix(values: Tensor) -> Tensor:
        return ATTENTIONS[mixer.attention](
            q, k, values.expand(-1, -1, -1, copies).contiguous(), log_alpha, log_beta, mask_mode=mixer.mask_mode,
            paths=mixer.paths)[..., 0]

    weights = _gradient(mix, q.new_zeros(*q.shape[:3], 1), lambda y: y[:, :, row * width + column])
    return weights.reshape(len(x), -1, height, width)


def attention_without_decay(mixer: PolylineMixer, x: Tensor, token: Token) -> Tensor:
    """Return the row of a polyline mixer's attention as it is without decay: (B, heads, H, W), which sums to 1.

    Args:
        mixer: the mixer.
        x: its input, (B, H, W, C).
        token: row and column.
    """
    with torch.inference_mode(False), torch.no_grad():
        x = x.detach().clone()
        logs = at_least_float(x.new_zeros(len(x), mixer.num_heads, *x.shape[1:3]))
        attention = _polyline(mixer, x, *token, (logs, logs))
    return attention / attention.sum((2, 3), keepdim=True)           # some forms add up two masks


@torch.no_grad()
def polyline_mask(mixer: PolylineMixer, x: Tensor, token: Token) -> Tensor:
    """Return the row of a polyline mixer's decay mask: (B, heads, H, W).

    It is L + L~ for paths='both' (Zhao et al., equation 10), so that 2 means no decay, and L otherwise.

    Args:
        mixer: a mixer with paths 'both', 'v2h' or 'rmt'.
        x: its input, (B, H, W, C).
        token: row and column.

    Raises:
        ValueError: the paths of the mixer are no polylines.
    """
    if mixer.paths not in ('both', 'v2h', 'rmt'):
        raise ValueError(f'paths={mixer.paths!r} has no polyline mask')
    (i, j), (log_alpha, log_beta) = token, (at_least_float(logs) for logs in mixer.decay_logs(x))
    rows = row_log_decay(log_alpha, log_alpha.dtype)                       # [i, j, l]
    columns = column_log_decay(log_beta, log_beta.dtype)                   # [i, k, l]
    # To column l of row i, then down column l (V2H); or down column j, then along row k (H2V).
    mask = (rows[:, :, i, j, None] + columns[:, :, i]).exp()
    if mixer.paths == 'both':
        mask = mask + (columns[:, :, i, :, j, None] + rows[:, :, :, j]).exp()
    return mask


def _tree(mixer: TreeMixer, x: Tensor, row: int, column: int) -> Tensor:
    return mixer.influence(x, row, column, mixer.edges(x, mixer.levels(*x.shape[1:3])))


def _eos(mixer: EosMixer, x: Tensor, row: int, column: int) -> Tensor:
    tokens = mixer.recurrence.tokens(x)
    values, scale = at_least_float(mixer.value(x)), None
    if mixer.mode == 'axis':
        variance = mixer._run(values, tokens, 1).var(-1, correction=0, keepdim=True)          # (B, W, H, 1)
        scale = (variance + mixer.norm.eps).rsqrt()

    def mix(values: Tensor) -> Tensor:
        if scale is None:
            return mixer._run(values, tokens, 0)
        return mixer._run((mixer._run(values, tokens, 1) * scale).transpose(1, 2), tokens, 2)

    weights = _gradient(mix, values, lambda y: y[:, row, column]).unflatten(3, (mixer.num_heads, -1))
    return weights.mean(-1).permute(0, 3, 1, 2)


def _separable(mixer: SeparableSelfAttention, x: Tensor, row: int, column: int) -> Tensor:
    query = at_least_float(mixer.query(x))
    ones = query.new_ones(*query.shape[:3], 1)

    def mix(keys: Tensor) -> Tensor:
        return separable_attention(query, keys, ones, patch_size=mixer.patch_size, sampling=mixer.sampling)

    return _gradient(mix, torch.zeros_like(ones), lambda y: y[:, row, column]).permute(0, 3, 1, 2)


def _multi_head(mixer: MultiHeadSelfAttention, x: Tensor, place: int, token: int) -> Tensor:
    dim, heads = x.shape[1], mixer.num_heads
    q, k, _ = (y[:, :, place:place + 1] for y in mixer.qkv_proj(x).split(dim, 1))
    q = q[..., token:token + 1]                                            # (B, C, 1, 1): the other rows are not needed

    def split(y: Tensor) -> Tensor:
        """(B, C, 1, N) -> (B, heads, N, C / heads)."""
        return y.squeeze(2).unflatten(1, (heads, -1)).transpose(2, 3)

    def mix(values: Tensor) -> Tensor:
        key, value = mixer.shorten(k, values.repeat_interleave(dim // heads, 1))
        return F.scaled_dot_product_attention(split(q), split(key), split(value))[..., 0]

    own = at_least_float(_gradient(mix, q.new_zeros(len(x), heads, 1, x.shape[3]), lambda y: y))
    weights = own.new_zeros(len(x), heads, *x.shape[2:])
    weights[:, :, place] = own[:, :, 0]
    return weights


# Mixer -> its row for a token of its input, (B, heads, H, W). The first that is a base class counts, because
# `subquad.prepare` makes subclasses.
ROWS: Dict[Type[nn.Module], Callable[..., Tensor]] = {
    PolylineMixer: _polyline,
    TreeMixer: _tree,
    EosMixer: _eos,
    SeparableMixer: lambda mixer, x, *token: _separable(mixer, x.permute(0, 3, 1, 2), *token),
    SeparableSelfAttention: _separable,
    MultiHeadSelfAttention: _multi_head,
}


def _has_channels_first(mixer: nn.Module) -> bool:
    return isinstance(mixer, (SeparableSelfAttention, MultiHeadSelfAttention)) and not isinstance(mixer, SeparableMixer)


def mixer_influence(mixer: nn.Module, x: Tensor, token: Token) -> Tensor:
    """Return the influence of every token of a mixer's input on one token of its output.

    What counts as a mixer's matrix is the map from values to the mixed values, before gates, LePE and the output layer:
    attention weights with their decay (PPMA), the rows of the inverse matrix (Myo), the products of shrink, oscillation
    and expand states (LCSM), the context scores of the token's group (MobileViTv2, where keys are the values that are
    added up). Between the two passes of an `EosMixer`, the statistics of the norm are held fixed, too. Where the
    channels of a head differ, as in recurrences with a decay for each channel, the row is their mean.

    Args:
        mixer: a mixer of `subquad.backbones.mixers`.
        x: its input: tokens (B, H, W, C), maps (B, C, H, W) for SeparableSelfAttention, or groups (B, C, P, N) for
            MultiHeadSelfAttention and LinformerSelfAttention.
        token: row and column of the token; for groups the numbers of the group and of the token in it.

    Returns:
        (B, heads, H, W), or (B, heads, P, N), at least float32. Separable attention counts as one head, the mean over
        its latent tokens. In the preset 's5', where heads share one memory, a head's row adds up the effects on all
        heads.

    Raises:
        ValueError: the token is outside of the input, or the mixer is none of this package.
    """
    row = next((row for kind, row in ROWS.items() if isinstance(mixer, kind)), None)
    if row is None:
        raise ValueError(f'{type(mixer).__name__} is no mixer of this package: {_names()}')
    if x.ndim != 4:
        raise ValueError(f'x must have 4 dimensions, got {tuple(x.shape)}')
    size = tuple(x.shape[2:] if _has_channels_first(mixer) else x.shape[1:3])
    token = check_place('token', token, size, 'map')
    with torch.inference_mode(False), torch.no_grad():
        return row(mixer, x.detach().clone(), *token)                  # a clone is no inference tensor


def influence(model: nn.Module, x: Tensor, pixel: Token, layers: Layers = None) -> Dict[str, TokenInfluence]:
    """Return the influence of every token on the token that contains a pixel, for each layer, in evaluation mode.

    The rows are exact, and are computed by one backward pass through each mixer's operator (`mixer_influence`).

    Args:
        model: a model with mixers of this package, also with features_only=True or inside of another module, whose
            whole forward pass then runs. Layers to which `subquad.graft` added a polyline mask are timm's own, and do
            not count.
        x: images (B, C, H, W) as the model takes them.
        pixel: row and column of a pixel of the images, (0, 0) to (H - 1, W - 1). `pixel_of` converts fractions.
        layers: names of the layers, such as 'stages.2.blocks.1', or one name; None for all.

    Returns:
        The influences by the name of the layer. Names are those of the modules, without a last part 'mixer' or 'attn'.

    Raises:
        TypeError: the model is no module, or cannot run images of this dtype.
        ValueError: the pixel is outside of the images, there are no images, the model has no mixers of this package or
            does not run a layer, or `layers` is empty or has an entry that is no layer.
    """
    check_model(model)
    check_images(x)
    pixel = check_place('pixel', pixel, tuple(x.shape[2:]), 'image')
    found = {}
    for name, layer in observed_mixers(model, x, layers).items():
        token = token_of(pixel, tuple(x.shape[2:]), layer.size)
        found[name] = TokenInfluence(token, layer.influence(token))
    return found


class ObservedMixer(NamedTuple):
    """A mixer of a model with its input for some images.

    Attributes:
        mixer: the mixer.
        x: its input, as `mixer_influence` takes it.
        size: rows and columns of the map.
        sampling: how groups of tokens are drawn from the map, or None if x is the map.
    """
    mixer: nn.Module
    x: Tensor
    size: Token
    sampling: Optional[str] = None

    def influence(self, token: Token) -> Tensor:
        """Return the influence of every token of the map on one, (B, heads, h, w)."""
        if self.sampling is None:
            return mixer_influence(self.mixer, self.x, token)
        numbers = torch.arange(self.size[0] * self.size[1], dtype=torch.float64).reshape(1, 1, *self.size)
        groups = fold_patches(numbers, PATCH, self.sampling)[0, 0]
        place = (groups == token[0] * self.size[1] + token[1]).nonzero()[0].tolist()
        weights = mixer_influence(self.mixer, self.x, tuple(place))
        return unfold_patches(weights, PATCH, self.sampling, *self.size)


def observed_mixers(model: nn.Module, x: Tensor, layers: Layers = None) -> Dict[str, ObservedMixer]:
    """Return the mixers of a model with their inputs for images x (B, C, H, W), in evaluation mode, by layer.

    Raises:
        ValueError: the model has no mixers of this package or does not run a layer, or `layers` is empty or has an
            entry that is no layer.
    """
    wanted = _chosen_mixers(model_mixers(model), layers)
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, MobileViTv2Block)}
    around: List[Tuple[Token, str]] = []                 # size of the map of the current block, and its sampling

    def observe(module: nn.Module, tokens: Tensor) -> Optional[ObservedMixer]:
        tokens = tokens.detach().clone()                 # not an inference tensor
        if isinstance(module, MobileViTv2Block):
            around.append((tuple(to_even_size(tokens[:, :1]).shape[2:]), module.sampling))
            return None
        if isinstance(module, MultiHeadSelfAttention):
            return ObservedMixer(module, tokens, *around[-1])
        size = tokens.shape[2:] if _has_channels_first(module) else tokens.shape[1:3]
        return ObservedMixer(module, tokens, tuple(size))

    with torch.inference_mode(False), torch.no_grad():
        observed = observe_inputs(model, {**blocks, **wanted}, x.detach().clone(), observe)
    for name in wanted:
        if name not in observed:
            raise ValueError(f'{type(model).__name__} does not run its layer {name!r} for these images')
    return {name: observed[name] for name in wanted}


def _chosen_mixers(mixers: Dict[str, nn.Module], layers: Layers) -> Dict[str, nn.Module]:
    """Return the mixers that `layers` names."""
    names = [layers] if isinstance(layers, str) else list(mixers) if layers is None else layers
    if not isinstance(names, Sequence) or not names:
        raise ValueError(f"layers must be None, or one or more of {', '.join(mixers)}, got {layers!r}")
    for name in names:
        if not isinstance(name, str) or name not in mixers:
            raise ValueError(f"there is no layer {name!r}; the layers are {', '.join(mixers)}")
    return {name: mixers[name] for name in names}


def model_mixers(model: nn.Module) -> Dict[str, nn.Module]:
    """Return the mixers of a model by their names without a last part 'mixer' or 'attn'.

    Raises:
        ValueError: there is none.
    """
    found = {name.removesuffix('.mixer').removesuffix('.attn'): module
             for name, module in model.named_modules() if isinstance(module, tuple(ROWS))}
    if not found:
        raise ValueError(f'{type(model).__name__} has no mixer of this package: {_names()}')
    return found


def pixel_of(at: Tuple[float, float], size: Token) -> Token:
    """Return the pixel at fractions of height and width, 0 to below 1, of an image of a size (height, width).

    Raises:
        ValueError: the fractions are outside of this range.
    """
    if not _is_pair(at, Real) or not all(0 <= place < 1 for place in at):
        raise ValueError(f'at must be two fractions of height and width from 0 to below 1, got {at!r}')
    return int(at[0] * size[0]), int(at[1] * size[1])


def token_of(pixel: Token, image: Token, size: Token) -> Token:
    """Return the token that contains a pixel: row and column on a map of a size (rows, columns)."""
    return pixel[0] * size[0] // image[0], pixel[1] * size[1] // image[1]


def check_place(name: str, place: Any, size: Token, where: str) -> Token:
    """Return (row, column) as Python's integers.

    Raises:
        ValueError: `place` is not (row, column) in a size (height, width).
    """
    if not _is_pair(place, Integral):
        raise ValueError(f'{name} must be two integers (row, column), got {place!r}')
    if not all(0 <= n < length for n, length in zip(place, size)):
        raise ValueError(f'{name} {tuple(place)} is outside of the {where} of {size[0]} x {size[1]}: rows go from 0 to '
                         f'{size[0] - 1}, columns from 0 to {size[1] - 1}')
    return int(place[0]), int(place[1])


def _is_pair(place: Any, kind: type) -> bool:
    """Whether `place` has two numbers of a kind, also of NumPy's types."""
    return (isinstance(place, Iterable) and not isinstance(place, Tensor) and len(pair := list(place)) == 2
            and all(isinstance(n, kind) and not isinstance(n, bool) for n in pair))


def _names() -> str:
    return ', '.join(kind.__name__ for kind in ROWS)
