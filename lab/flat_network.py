"""A stack of the skeleton's blocks without downsampling, for tasks whose tokens must keep their places.

The four-stage skeleton halves its maps, so that its last stage sees a whole small image even without a mixer. This
network has the same blocks at one resolution: only the mixer carries information beyond the blocks' 3 x 3 windows.
"""
from typing import Annotated, Any, Optional

from timm.models import register_model
from torch import Tensor, nn

from subquad.backbones.blocks import Block, check_tokens
from subquad.backbones.mixers.choices import find_mixer, mixer_name
from subquad.backbones.options import InChans, NumClasses, checked, integer, number, one_of, or_none
from subquad.backbones.timm_interface import init_linear

from . import distant_copy  # noqa: F401  (registers the data set of the task copy)


class FlatNetwork(nn.Module):
    """Embedding, `depth` blocks and a classifier: images (B, in_chans, H, W) or sequences of tokens (B, N) -> logits.

    Patches of an image become a map of tokens (B, H / patch_size, W / patch_size, dim), a sequence a map of one row.

    Args:
        mixers: name of the mixer of all blocks, as in `HierarchicalBackbone`.
        output: 'places' for logits (B, T, num_classes) of every token, or 'mean' for (B, num_classes) of the mean over
            the tokens, without padding.
        num_classes: number of classes.
        in_chans: number of channels of an image.
        patch_size: side of the patch of a token.
        vocab_size: size of the vocabulary of sequences, whose token 0 is padding; None for images.
        dim: channels of a token.
        depth: number of blocks.
        num_heads: number of heads.
        mlp_ratio: width of the feed-forward layers, as a multiple of `dim`.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    @checked
    def __init__(
            self,
            mixers: Annotated[str, mixer_name()] = 'attention',
            output: Annotated[str, one_of('places', 'mean')] = 'mean',
            num_classes: NumClasses = 10,
            in_chans: InChans = 3,
            patch_size: Annotated[int, integer(1, 256)] = 4,
            vocab_size: Annotated[Optional[int], or_none(integer(2, 10_000_000))] = None,
            dim: Annotated[int, integer(1, 8192)] = 48,
            depth: Annotated[int, integer(1, 256)] = 2,
            num_heads: Annotated[int, integer(1, 1024)] = 4,
            mlp_ratio: Annotated[float, number(0.125, 64)] = 2.,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.num_classes, self.output, self.vocab_size = num_classes, output, vocab_size
        self.encoder = (nn.Embedding(vocab_size, dim, **dd) if vocab_size
                        else nn.Conv2d(in_chans, dim, patch_size, patch_size, **dd))
        build = find_mixer(mixers)
        self.blocks = nn.Sequential(*(
            Block(dim, build(stage=0, block=n, dim=dim, num_heads=num_heads, **dd), mlp_ratio, **dd)
            for n in range(depth)))
        self.norm = nn.LayerNorm(dim, **dd)
        self.head = nn.Linear(dim, num_classes, **dd)
        self.apply(init_linear)

    def get_classifier(self) -> nn.Module:
        """The classifier."""
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, num_classes) or (B, num_classes)."""
        known = None
        if self.vocab_size:
            known = (check_tokens(x, self.vocab_size) != 0)[..., None]
            u = self.encoder(x)[:, None]                            # (B, 1, N, dim)
        else:
            u = self.encoder(x).permute(0, 2, 3, 1)
        u = self.norm(self.blocks(u)).flatten(1, 2)                 # (B, T, dim)
        if self.output == 'places':
            return self.head(u)
        if known is None:
            return self.head(u.mean(1))
        return self.head((u * known).sum(1) / known.sum(1).clamp(min=1))


@register_model
def flat_network(pretrained: bool = False, **kwargs: Any) -> FlatNetwork:
    """The skeleton's blocks without downsampling; it has no published weights.

    Raises:
        ValueError: `pretrained`, or an option that is not allowed.
    """
    if pretrained:
        raise ValueError('flat_network has no published weights')
    for name in ('pretrained_cfg', 'pretrained_cfg_overlay', 'cache_dir'):          # timm passes them
        kwargs.pop(name, None)
    return FlatNetwork(**kwargs)
