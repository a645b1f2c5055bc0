"""LCSMSequence: a causal language model that mixes tokens by a linear recurrence of the user's choice.

It is the network with which Qin et al., "Unlocking the Secrets of Linear Complexity Sequence Model from A Unified
Perspective", arXiv 2405.17383, compare recurrences on text and on associative recall. The layer is the one of the
images, backbones/mixers/eos.py, from the first token to the last.
"""
from typing import Annotated, Any, ClassVar, Dict, Optional, Set

import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .blocks import check_tokens
from .mixers import EosMixer
from .options import Flag, NumClasses, Options, Rate, check, checked, integer, known_options, number, or_none
from .timm_interface import build_model, published_cfgs

__all__ = ['LCSMSequence']


class GLU(nn.Module):
    """down(SiLU(a) * b), where a and b are the halves of up(x): (..., dim) -> (..., dim)."""

    def __init__(self, dim: int, hidden: int, **dd: Any):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * hidden, **dd), nn.Linear(hidden, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(F.silu(a) * b)


class Layer(nn.Module):
    """x + mixer(conv(norm(x))), and x + glu(norm(x)) if there is a GLU: (B, T, dim) -> (B, T, dim).

    The convolution is depthwise and causal, or absent for conv_size=0.
    """

    def __init__(self, dim: int, mixer: nn.Module, hidden: int, conv_size: int, drop_rate: float, **dd: Any):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, **dd)
        self.conv = nn.Conv1d(dim, dim, conv_size, padding=conv_size - 1, groups=dim, **dd) if conv_size else None
        self.mixer = mixer
        self.norm2 = nn.LayerNorm(dim, **dd) if hidden else None
        self.glu = GLU(dim, hidden, **dd) if hidden else None
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.conv is not None:
            y = self.conv(y.transpose(1, 2))[..., :x.shape[1]].transpose(1, 2)
        x = x + self.drop(self.mixer(y.unsqueeze(1)).squeeze(1))                       # a grid of one row
        return x if self.glu is None else x + self.drop(self.glu(self.norm2(x)))


class LCSMSequence(nn.Module):
    """Causal model of sequences of tokens: (B, T) -> logits (B, T, num_classes) for any T >= 1.

    Logits of a token depend on this token and on earlier ones only. With mixer='cosformer' they also depend on the
    length, because its angles do.

    Args:
        num_classes: number of classes of a token, for a language model the size of the vocabulary; 0 for no head.
        vocab_size: size of the vocabulary of the input; None for num_classes.
        dim: number of channels of the network.
        depth: number of layers.
        num_heads: number of heads; dim must be a multiple of it.
        conv_size: tokens that a causal depthwise convolution before each mixer sees, as in Mamba; 0 for none, as in the
            paper.
        mlp_ratio: hidden width of the gated feed-forward network of a layer, as a multiple of dim; 0 for none.
        tied: the head shares the embedding's weights, if num_classes equals vocab_size.
        drop_rate: dropout rate of the embedding and of the layers' outputs.
        device, dtype: device and dtype of the parameters.
        mixer_options: `mixer` (a preset such as 'gla' or a code of the paper), `expand_dim`, `tau`, `numbering`,
            `learned_decay` and `gated` of `EosMixer`.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    PASSED_ON: ClassVar[Options] = known_options(EosMixer, without=('mode',))

    @checked
    def __init__(
            self,
            num_classes: NumClasses = 256,
            vocab_size: Annotated[Optional[int], or_none(integer(1, 10_000_000))] = None,
            dim: Annotated[int, integer(1, 65_536)] = 64,
            depth: Annotated[int, integer(1, 1024)] = 2,
            num_heads: Annotated[int, integer(1, 65_536)] = 1,
            conv_size: Annotated[int, integer(0, 64)] = 0,
            mlp_ratio: Annotated[float, number(0, 64)] = 2.,
            tied: Flag = True,
            drop_rate: Rate = 0.,
            device=None,
            dtype=None,
            **mixer_options: Any,
    ):
        super().__init__()
        vocab_size = vocab_size or num_classes
        if not vocab_size:
            raise ValueError('vocab_size must be given with num_classes=0')
        dd = {'device': device, 'dtype': dtype}
        self.num_classes, self.vocab_size, self.grad_checkpointing = num_classes, vocab_size, False
        self.num_features = self.head_hidden_size = dim
        self.embedding = nn.Embedding(vocab_size, dim, **dd)
        self.drop = nn.Dropout(drop_rate)
        hidden = max(1, int(dim * mlp_ratio)) if mlp_ratio else 0
        self.layers = nn.ModuleList(
            Layer(dim, EosMixer(dim, num_heads, mode='forward', **mixer_options, **dd), hidden, conv_size, drop_rate,
                  **dd)
            for _ in range(depth))
        self.norm = nn.LayerNorm(dim, **dd)
        self.tied = tied and num_classes == vocab_size
        # A second name of the same weights could not be saved: safetensors refuses shared memory.
        self.head = nn.Linear(dim, num_classes, bias=False, **dd) if num_classes and not self.tied else nn.Identity()
        self.apply(_init)

    def no_weight_decay(self) -> Set[str]:
        """The decays, angles and matrices of recurrences that do not belong to linear layers."""
        return {name for name, _ in self.named_parameters()
                if '.mixer.recurrence.' in name and not name.endswith(('.weight', '.bias'))}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the layers' activations in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> Dict[str, object]:
        """Patterns for layer decay: the embedding, then every layer."""
        return dict(stem=r'^embedding', blocks=[(r'^layers\.(\d+)', None), (r'^norm', (99999,))])

    def get_classifier(self) -> nn.Module:
        """The head, the embedding if the head shares its weights, or nn.Identity if there is none."""
        return self.embedding if self.tied else self.head

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Replace the head by a randomly initialized one, which shares no weights.

        Args:
            num_classes: number of classes; 0 for no head.
            global_pool: None; each token has its own logits.

        Raises:
            ValueError: the number of classes is not allowed, or a pooling is given.
        """
        if global_pool is not None:
            raise ValueError(f'global_pool must be None, got {global_pool!r}: each token has its own logits')
        check(type(self).__name__, known_options(type(self)), {'num_classes': num_classes})
        weight = self.embedding.weight
        self.num_classes, self.tied = num_classes, False
        self.head = (nn.Linear(self.num_features, num_classes, bias=False, device=weight.device, dtype=weight.dtype)
                     if num_classes else nn.Identity())
        self.head.apply(_init)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the features (B, T, dim) of tokens (B, T).

        Raises:
            ValueError: the input is not an int32 or int64 tensor (B, T), or a token is not below `vocab_size`.
        """
        x = self.drop(self.embedding(check_tokens(x, self.vocab_size)))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.grad_checkpointing else layer(x)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits (B, T, num_classes) from the output of `forward_features`, or that output with `pre_logits`."""
        if pre_logits:
            return x
        return F.linear(x, self.embedding.weight) if self.tied else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _init(module: nn.Module) -> None:
    """Initialize embeddings with standard deviation 0.02, and linear layers by Glorot & Bengio (Xavier uniform)."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


default_cfgs = generate_default_cfgs(published_cfgs({'lcsm_sequence': dict(
    num_classes=256, input_size=None, pool_size=None, interpolation=None, mean=None, std=None, classifier='head',
    first_conv=None, license='apache-2.0', paper_ids='arXiv:2405.17383')}))


@register_model
def lcsm_sequence(pretrained: bool = False, **kwargs: Any) -> LCSMSequence:
    """A causal language model over tokens; every size is an option."""
    return build_model(LCSMSequence, 'lcsm_sequence', pretrained, kwargs, feature_maps=0)
