"""PPMA: a hierarchical vision transformer with polyline path masked attention.

Zhao et al., "Polyline Path Masked Attention for Vision Transformer", NeurIPS 2025, arXiv 2506.15940, and its published
code (Apache-2.0). The defaults build the networks of the published weights, which follow the code. The code adds the
logarithm of the mask to the logits (`mask_mode='additive'`), whereas the paper multiplies the softmax by the mask
(`mask_mode='multiplicative'`). See backbones/mixers/polyline.py for every option.
"""
from functools import partial
from typing import Annotated, Any, ClassVar, Dict, Sequence, Union

from timm.models import generate_default_cfgs, register_model
from torch import nn

from . import hierarchical
from .hierarchical import HierarchicalBackbone
from .mixers import PolylineMixer
from .mixers.polyline import ATTENTIONS
from .options import Options, checked, each_stage, known_options, number, one_of, one_or_each_stage
from .timm_interface import build_model, image_cfg, published_cfgs
from .weights.ppma_keys import is_published, to_our_keys, to_published_keys

__all__ = ['PPMA']

# The published networks use criss-cross attention on large maps and full attention on small maps.
ARCHS: Dict[str, Dict[str, Any]] = {
    'tiny': dict(hierarchical.ARCHS['tiny'], attention=('crisscross', 'crisscross', 'full', 'full')),
    'small': dict(hierarchical.ARCHS['small'], attention=('crisscross', 'crisscross', 'crisscross', 'full')),
    'base': dict(
        hierarchical.ARCHS['base'],
        attention=('crisscross', 'crisscross', 'crisscross', 'full'),
        rmt_range=(5, 5, 6, 6),
    ),
    'test': dict(hierarchical.ARCHS['test'], attention=('crisscross', 'crisscross', 'full', 'full')),
}
# Criss-cross attention in every stage. Its cost grows as N^1.5 with the number N of tokens, that of full attention
# as N^2.
ARCHS.update({
    f'{size}_crisscross': {**ARCHS[size], 'attention': ('crisscross',) * 4} for size in ('tiny', 'small', 'base')
})


class PPMA(HierarchicalBackbone):
    """Backbone with polyline path masked attention.

    Args:
        attention: 'full', 'crisscross', 'linear' or 'decomposed', one for all stages or one for each.
        rmt_range: with paths='rmt', the range of the decays of each stage's heads (RMT, section 3.2).
        kwargs: `mask_mode`, `paths` and `shared_decay` of `PolylineMixer`, and arguments of `HierarchicalBackbone`.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    PASSED_ON: ClassVar[Options] = known_options(PolylineMixer)

    @checked
    def __init__(
            self,
            attention: Annotated[Union[str, Sequence[str]], one_or_each_stage(one_of(*ATTENTIONS))] = 'full',
            rmt_range: Annotated[Sequence[float], each_stage(number(0, 64))] = (4, 4, 6, 6),
            **kwargs: Any,
    ):
        def mixer(stage: int, block: int, attention: Any, rmt_range: Sequence[float], **options: Any) -> nn.Module:
            attention = attention if isinstance(attention, str) else attention[stage]
            return PolylineMixer(attention=attention, rmt_range=rmt_range[stage], **options)

        super().__init__(mixer, attention=attention, rmt_range=rmt_range, **kwargs)

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Rename the keys of published weights. Keys that have this model's names are kept.

        Output norms that this model does not have are dropped. The loader checks all other keys.
        """
        if not is_published(weights):
            return weights
        renamed = to_our_keys(weights)
        return {key: value for key, value in renamed.items()
                if self.output_norms is not None or not key.startswith('output_norms.')}

    def published_state(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        return to_published_keys(weights)


_cfg = partial(image_cfg, paper_ids='arXiv:2506.15940')
default_cfgs = generate_default_cfgs(published_cfgs({
    **{f'ppma_{size}': _cfg() for size in ARCHS if size != 'test'},
    'test_ppma': _cfg(input_size=(3, 64, 64), pool_size=(2, 2), crop_pct=1.0),
}))


@register_model
def ppma_tiny(pretrained: bool = False, **kwargs: Any) -> PPMA:
    """PPMA-T: 14.3 M parameters, 2.7 GMACs at 224."""
    return build_model(PPMA, 'ppma_tiny', pretrained, {**ARCHS['tiny'], **kwargs})


@register_model
def ppma_small(pretrained: bool = False, **kwargs: Any) -> PPMA:
    """PPMA-S: 27.0 M parameters, 4.9 GMACs at 224."""
    return build_model(PPMA, 'ppma_small', pretrained, {**ARCHS['small'], **kwargs})


@register_model
def ppma_base(pretrained: bool = False, **kwargs: Any) -> PPMA:
    """PPMA-B: 54.2 M parameters, 10.6 GMACs at 224."""
    return build_model(PPMA, 'ppma_base', pretrained, {**ARCHS['base'], **kwargs})


@register_model
def ppma_tiny_crisscross(pretrained: bool = False, **kwargs: Any) -> PPMA:
    """PPMA-T with criss-cross attention in every stage: 14.3 M parameters, 2.6 GMACs at 224. No published weights."""
    return build_model(PPMA, 'ppma_tiny_crisscross', pretrained, {**ARCHS['tiny_crisscross'], **kwargs})


@register_model
def ppma_small_crisscross(pretrained: bool = False, **kwargs: Any) -> PPMA:
    """PPMA-S with criss-cross attention in every stage: 27.0 M parameters, 4.9 GMACs at 224. No published weights."""
    return build_model(PPMA, 'ppma_small_crisscross', pretrained, {**ARCHS['small_crisscross'], **kwargs})


@register_model
def ppma_base_crisscross(pretrained: bool = False, **kwargs: Any) -> PPMA:
    """PPMA-B with criss-cross attention in every stage: 54.2 M parameters, 10.6 GMACs at 224. No published weights."""
    return build_model(PPMA, 'ppma_base_crisscross', pretrained, {**ARCHS['base_crisscross'], **kwargs})


@register_model
def test_ppma(pretrained: bool = False, **kwargs: Any) -> PPMA:
    """A small PPMA with a few hundred thousand parameters, for tests and demonstrations."""
    return build_model(PPMA, 'test_ppma', pretrained, {**ARCHS['test'], **kwargs})
