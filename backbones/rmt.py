"""RMT: a hierarchical vision transformer with Manhattan self-attention.

Fan et al., "RMT: Retentive Networks Meet Vision Transformers", CVPR 2024, arXiv 2309.11523, and its published code,
which has no license. The network is PPMA's, which descends from it, with decays that are constants of each head. The
defaults follow the code. It adds the logarithm of the decay to the logits (`mask_mode='additive'`), whereas the paper
multiplies the softmax by the decay (`mask_mode='multiplicative'`).
"""
from functools import partial
from typing import Annotated, Any, ClassVar, Dict, List, Optional, Sequence, Union

from timm.layers import get_device_dtype
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from . import hierarchical
from .hierarchical import HierarchicalBackbone
from .mixers import PolylineMixer
from .mixers.polyline import manhattan_decay
from .options import Flag, Options, checked, each_stage, known_options, number, one_of, one_or_each_stage
from .timm_interface import build_model, image_cfg, init_linear, published_cfgs
from .weights import rmt_keys

__all__ = ['RMT']

ARCHS: Dict[str, Dict[str, Any]] = {
    'tiny': dict(
        hierarchical.ARCHS['tiny'],
        attention=('crisscross', 'crisscross', 'full', 'full'),
        rmt_range=(4, 4, 6, 6),
    ),
    'small': dict(
        hierarchical.ARCHS['small'],
        attention=('crisscross', 'crisscross', 'crisscross', 'full'),
        rmt_range=(4, 4, 6, 6),
    ),
    'base': dict(
        hierarchical.ARCHS['base'],
        attention=('crisscross', 'crisscross', 'crisscross', 'full'),
        rmt_range=(5, 5, 6, 6),
    ),
    'large': dict(
        hierarchical.ARCHS['base'],
        dims=(112, 224, 448, 640),
        num_heads=(7, 7, 14, 20),
        drop_path_rate=0.5,
        attention=('crisscross', 'crisscross', 'crisscross', 'full'),
        rmt_range=(6, 6, 6, 6),
    ),
    'test': dict(
        hierarchical.ARCHS['test'],
        attention=('crisscross', 'crisscross', 'full', 'full'),
        rmt_range=(4, 4, 6, 6),
    ),
}


class RMT(HierarchicalBackbone):
    """Backbone with Manhattan self-attention (MaSA).

    Args:
        attention: 'full', or 'crisscross' for decomposed MaSA (along rows, then along columns), one for all stages or
            one for each.
        rmt_range: the range of the decays of each stage's heads: head h of n decays by 1 - 2^(-2 - range * h / n) for
            each row and column.
        aux_head: add the classifier of tokens that the authors train with token labels (S*, B* and L* in the paper's
            tables). Half of the largest logits that it gives to a token is added to the logits.
        kwargs: `mask_mode` of `PolylineMixer`, and arguments of `HierarchicalBackbone`.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    PASSED_ON: ClassVar[Options] = {'mask_mode': known_options(PolylineMixer)['mask_mode']}

    @checked
    def __init__(
            self,
            attention: Annotated[Union[str, Sequence[str]], one_or_each_stage(one_of('full', 'crisscross'))] = 'full',
            rmt_range: Annotated[Sequence[float], each_stage(number(0, 64))] = (4, 4, 6, 6),
            aux_head: Flag = False,
            **kwargs: Any,
    ):
        def mixer(stage: int, block: int, attention: Any, rmt_range: Sequence[float], **options: Any) -> nn.Module:
            attention = attention if isinstance(attention, str) else attention[stage]
            return PolylineMixer(attention=attention, paths='rmt', rmt_range=rmt_range[stage], **options)

        super().__init__(mixer, attention=attention, rmt_range=rmt_range, **kwargs)
        self.heads = tuple(zip(kwargs['num_heads'], rmt_range))
        self.aux_head = aux_head
        self.reset_classifier(self.num_classes)

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        if self.aux_head:
            self.head.aux_fc = (nn.Linear(self.num_features, num_classes, **get_device_dtype(self)) if num_classes
                                else nn.Identity())
            init_linear(self.head.aux_fc)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        logits = self.head(x, pre_logits=pre_logits)
        if pre_logits or not self.aux_head or not self.num_classes:
            return logits
        return logits + 0.5 * self.head.aux_fc(x.permute(0, 2, 3, 1)).amax((1, 2))

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Rename the keys of published weights. Keys that have this model's names are kept.

        Output norms that this model does not have are dropped. The loader checks all other keys.

        Raises:
            WeightsError: the decays are those of another variant, or the place of the file's `aux_head` is unknown.
        """
        renamed = rmt_keys.to_our_keys(weights, self._decays())
        if self.aux_head and self.num_classes:
            rmt_keys.check_aux_head(renamed, self.num_features)
        return {key: value for key, value in renamed.items()
                if self.output_norms is not None or not key.startswith('output_norms.')}

    def options_in(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        return {'aux_head': True} if 'head.aux_fc.weight' in weights and not self.aux_head else {}

    def published_state(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        return rmt_keys.to_published_keys(weights, self._decays())

    def _decays(self) -> List[Tensor]:
        """The step logs (heads,) of each stage, which the authors' files hold."""
        return [manhattan_decay(heads, decay_range, 'cpu') for heads, decay_range in self.heads]


_cfg = partial(image_cfg, paper_ids='arXiv:2309.11523', license=None)
default_cfgs = generate_default_cfgs(published_cfgs({
    **{f'rmt_{size}': _cfg() for size in ARCHS if size != 'test'},
    'test_rmt': _cfg(input_size=(3, 64, 64), pool_size=(2, 2), crop_pct=1.0),
}))


def _build(name: str, pretrained: bool, options: Dict[str, Any]) -> RMT:
    if options.get('aux_head'):
        options['pretrained_cfg_overlay'] = dict(classifier=('head.fc', 'head.aux_fc'),
                                                 **(options.get('pretrained_cfg_overlay') or {}))
    return build_model(RMT, name, pretrained, options)


@register_model
def rmt_tiny(pretrained: bool = False, **kwargs: Any) -> RMT:
    """RMT-T: 14.3 M parameters, 2.6 GMACs at 224."""
    return _build('rmt_tiny', pretrained, {**ARCHS['tiny'], **kwargs})


@register_model
def rmt_small(pretrained: bool = False, **kwargs: Any) -> RMT:
    """RMT-S: 27.0 M parameters, 4.8 GMACs at 224."""
    return _build('rmt_small', pretrained, {**ARCHS['small'], **kwargs})


@register_model
def rmt_base(pretrained: bool = False, **kwargs: Any) -> RMT:
    """RMT-B: 54.2 M parameters, 10.4 GMACs at 224."""
    return _build('rmt_base', pretrained, {**ARCHS['base'], **kwargs})


@register_model
def rmt_large(pretrained: bool = False, **kwargs: Any) -> RMT:
    """RMT-L: 95.5 M parameters, 19.5 GMACs at 224."""
    return _build('rmt_large', pretrained, {**ARCHS['large'], **kwargs})


@register_model
def test_rmt(pretrained: bool = False, **kwargs: Any) -> RMT:
    """A small RMT with a few hundred thousand parameters, for tests and demonstrations."""
    return _build('test_rmt', pretrained, {**ARCHS['test'], **kwargs})
