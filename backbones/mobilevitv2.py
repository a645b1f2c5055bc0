"""MobileViTv2: inverted residuals and, from stride 8 on, blocks of transformer layers with separable self-attention.

Mehta & Rastegari, "Separable Self-attention for Mobile Vision Transformers", TMLR 2023, arXiv 2206.02680, and its
authors' library cvnets. Parameter names are timm's, so that the weights on its hub load as they are; the authors' own
files are translated. Differences from timm's model, none of which changes a published network: tokens are unfolded for
exporters only, keys are mapped after they are summed up, stochastic depth acts on residual branches only, and
new networks start otherwise (`weight_init`).
"""
from functools import partial
from typing import Any, ClassVar, Dict, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead, ConvMlp, DropPath, calculate_drop_path_rates, is_exportable, make_divisible
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from torch import Tensor, nn

from ..kernels.common.patches import fold, unfold
from ..kernels.common.tracing import exporting
from ._timm import checkpoint_seq, pooled_width
from .blocks import check_image, check_pool, folded, is_plain
from .inference import in_parts
from .mixers import LinformerSelfAttention, MultiHeadSelfAttention, SeparableSelfAttention
from .mixers.separable import check_source
from .options import COMMON, Options, check, flag, number, one_of
from .staged import StagedBackbone, init_kaiming, init_xavier
from .weights import pretrained_filter
from .weights.mobilevitv2_keys import DEPTHS, to_timm_keys

__all__ = ['MobileViTv2']

ATTENTIONS = ('separable', 'mha', 'linformer')
POOLINGS = ('avg', 'max', 'avgmax', 'catavgmax', '')
PATCH = (2, 2)
WIDTHS = (0.25, 2.5)
WEIGHT_INITS = ('kaiming', 'authors')
CHANNELS = (64, 128, 256, 384, 512)
# The authors' networks by their names' ending, and ours for tests.
ARCHS: Dict[str, Dict[str, Any]] = {
    **{f'{width:03d}': dict(width=width / 100) for width in range(50, 225, 25)}, 'test': dict(width=0.25)}


class ConvNormAct(nn.Module):
    """Convolution without bias, BatchNorm, SiLU unless `act` is False: (B, C, H, W) -> (B, C', H/stride, W/stride)."""

    def __init__(self, in_chs: int, out_chs: int, kernel_size: int = 1, stride: int = 1, dilation: int = 1,
                 groups: int = 1, act: bool = True, device=None, dtype=None):
        super().__init__()
        self.conv = nn.Conv2d(in_chs, out_chs, kernel_size, stride, kernel_size // 2 * dilation, dilation, groups,
                              bias=False, device=device, dtype=dtype)
        self.bn = nn.BatchNorm2d(out_chs, device=device, dtype=dtype)
        self.act = nn.SiLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        fold_norm = not self.bn.training and is_plain(self.conv, self.bn)
        return self.act(folded(self.conv, self.bn, x) if fold_norm else self.bn(self.conv(x)))


class InvertedResidual(nn.Module):
    """MobileNetv2's block: 1 x 1 to twice the channels, depthwise 3 x 3, linear 1 x 1; plus its input where it fits."""

    def __init__(self, in_chs: int, out_chs: int, stride: int = 1, dilation: int = 1, drop_path: float = 0.,
                 device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.residual = stride == 1 and in_chs == out_chs
        middle = make_divisible(2 * in_chs)
        self.conv1_1x1 = ConvNormAct(in_chs, middle, **dd)
        self.conv2_kxk = ConvNormAct(middle, middle, 3, stride, dilation, groups=middle, **dd)
        self.conv3_1x1 = ConvNormAct(middle, out_chs, act=False, **dd)
        self.drop_path = DropPath(drop_path) if drop_path and self.residual else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop_path(self.conv3_1x1(self.conv2_kxk(self.conv1_1x1(x))))
        return x + y if self.residual else y


class TransformerLayer(nn.Module):
    """x + attention(norm(x)); x + FFN(norm(x)). The norms are over channels and tokens together, an image each."""

    def __init__(self, dim: int, attention: nn.Module, drop_path: float = 0., device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.norm1 = nn.GroupNorm(1, dim, **dd)
        self.attn = attention
        self.norm2 = nn.GroupNorm(1, dim, **dd)
        self.mlp = ConvMlp(dim, 2 * dim, act_layer=partial(nn.SiLU, inplace=True), **dd)
        self.drop_path1, self.drop_path2 = (DropPath(drop_path) if drop_path else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, source: Optional[Tensor] = None, folded: bool = False) -> Tensor:
        """(B, C, H, W) -> the same; `source` and `folded` as for the attention. As in the authors' code, the source of
        cross-attention is not normalised."""
        x = x + self.drop_path1(self.attn(self.norm1(x), source, folded))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


@register_notrace_module
class MobileViTv2Block(nn.Module):
    """Depthwise 3 x 3, linear map to the layers' width, transformer layers, norm, linear map back: (B, C, H, W) -> the
    same, but for maps with an odd side, which grow by one (as the authors' do) unless `exact_size`."""

    def __init__(self, chs: int, dim: int, attentions: Tuple[nn.Module, ...], dilation: int = 1, drop_path: float = 0.,
                 sampling: str = 'pixel', exact_size: bool = False, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.conv_kxk = ConvNormAct(chs, chs, 3, dilation=dilation, groups=chs, **dd)
        self.conv_1x1 = nn.Conv2d(chs, dim, 1, bias=False, **dd)
        self.transformer = nn.Sequential(*(TransformerLayer(dim, unit, drop_path, **dd) for unit in attentions))
        self.norm = nn.GroupNorm(1, dim, **dd)
        self.conv_proj = ConvNormAct(dim, chs, act=False, **dd)
        self.sampling, self.exact_size = sampling, exact_size
        self.exportable = is_exportable()

    def forward_tokens(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        """(B, C, H, W) -> tokens (B, dim, H, W), the last norm included.

        Args:
            x: feature map.
            source: tokens (B, dim, H', W') of another image, such as the previous frame, which every layer takes its
                context from (cross-attention).
        """
        height, width = (n + -n % p for n, p in zip(x.shape[2:], PATCH))
        if (height, width) != tuple(x.shape[2:]) and not self.exact_size:
            x = F.interpolate(x, size=(height, width), mode='bilinear', align_corners=True)
        x = self.conv_1x1(self.conv_kxk(x))
        separable = isinstance(self.transformer[0].attn, SeparableSelfAttention)
        rows, columns = x.shape[2:]
        seen = x if source is None else check_source(x, source)
        if isinstance(self.transformer[0].attn, LinformerSelfAttention):
            self.transformer[0].attn.check_grid(*(-(-n // p) for n, p in zip(seen.shape[2:], PATCH)))
        # Exporters and the other attention units want a row of tokens for each group.
        even = not any(n % p for y in (x, seen) for n, p in zip(y.shape[2:], PATCH))
        fold_tokens = not separable or even and (self.exportable or exporting())
        if fold_tokens:
            x = fold(x, PATCH, self.sampling)
            source = None if source is None else fold(source, PATCH, self.sampling)
        for layer in self.transformer:
            x = layer(x, source, fold_tokens)
        x = self.norm(x)
        return unfold(x, PATCH, self.sampling, rows, columns) if fold_tokens else x

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        return self.conv_proj(self.forward_tokens(x, source))


class Stage(nn.Sequential):
    """Blocks one after the other; on a CPU a large batch goes through all of them a few images at a time."""

    grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        return in_parts(self, self._forward, x, x.shape[1] * x.shape[2] * x.shape[3])

    def _forward(self, x: Tensor) -> Tensor:
        return checkpoint_seq(self, x) if self.grad_checkpointing and not torch.jit.is_tracing() else super().forward(x)


class Stem(ConvNormAct):
    """3 x 3 at stride 2: (B, in_chans, H, W) -> (B, C, ceil(H/2), ceil(W/2)), channels last in memory."""

    def forward(self, x: Tensor) -> Tensor:
        x = check_image(x, self.conv.in_channels)
        return super().forward(x.contiguous(memory_format=torch.channels_last))


class MobileViTv2(StagedBackbone):
    """MobileViTv2 of any width.

    Args:
        width: factor of the channels (64, 128, 256, 384, 512), from 0.25 to 2.5; the published ones are 0.5 to 2.0.
        num_latent_tokens: of separable attention, from 1 to 64.
        attention: 'separable', or 'mha' or 'linformer' in its place (Table 1).
        sampling: which tokens see each other: 'pixel', those at one place of their 2 x 2 patch, or 'patch', those of
            one quarter of the map (our reading of Appendix E).
        exact_size: keep odd maps as they are. By default those that a block of stride 8 or more gets are resized up to
            even sides, as the authors do: images of 224 end in 8 x 8.
        output_stride: 8, 16 or 32; below 32 the last stages dilate in place of striding.
        num_classes: 0 for no classifier.
        in_chans: input channels.
        global_pool: timm's 'avg', 'max', 'avgmax', 'catavgmax' or, without classifier, ''.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth, rising over the blocks of a stage and over stages; a block's layers share it.
        img_size: what 'linformer' is made for (default 256); otherwise only checked.
        weight_init: how new weights are drawn. 'kaiming': what the authors' configurations name, convolutions by He et
            al. with the fan of the output, biases 0, the classifier from a normal distribution of standard deviation
            0.02. 'authors': what their library really starts with, since its initialization receives a generator where
            it expects modules and changes nothing: PyTorch's defaults, and a classifier by Glorot & Bengio (Xavier).
        device, dtype: of the parameters.

    Raises:
        ValueError: an option that is not allowed.
    """

    OPTIONS: ClassVar[Options] = {
        **COMMON, **SeparableSelfAttention.OPTIONS, 'width': number(*WIDTHS), 'attention': one_of(*ATTENTIONS),
        'exact_size': flag(), 'output_stride': one_of(8, 16, 32), 'global_pool': one_of(*POOLINGS),
        'weight_init': one_of(*WEIGHT_INITS)}

    def __init__(self, width: float = 1.0, num_latent_tokens: int = 1, attention: str = 'separable',
                 sampling: str = 'pixel', exact_size: bool = False, output_stride: int = 32, num_classes: int = 1000,
                 in_chans: int = 3, global_pool: str = 'avg', drop_rate: float = 0., drop_path_rate: float = 0.,
                 img_size: Union[None, int, Tuple[int, int]] = None, weight_init: str = 'kaiming', device=None,
                 dtype=None):
        check(type(self).__name__, self.OPTIONS, dict(
            width=width, num_latent_tokens=num_latent_tokens, attention=attention, sampling=sampling,
            exact_size=exact_size, output_stride=output_stride, num_classes=num_classes, in_chans=in_chans,
            global_pool=global_pool, drop_rate=drop_rate, drop_path_rate=drop_path_rate, img_size=img_size,
            weight_init=weight_init))
        super().__init__(num_classes, in_chans)
        if attention != 'separable' and (exact_size or num_latent_tokens != 1):
            raise ValueError(f"exact_size and num_latent_tokens go with attention='separable', got {attention!r}")
        check_pool(global_pool, num_classes)
        dd = {'device': device, 'dtype': dtype}
        # The authors' rounding; it changes nothing at the published widths.
        stem = make_divisible(min(max(32 * width, 16), 64), 8)
        dims = [make_divisible(c * width, 8 if n else 16) for n, c in enumerate(CHANNELS)]
        rates = calculate_drop_path_rates(drop_path_rate, [1, 2, 2, 2, 2], stagewise=True)
        size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size or (256, 256))
        self.stem = Stem(in_chans, stem, 3, 2, **dd)
        stages, in_chs, stride, dilation = [], stem, 2, 1
        self.feature_info = []
        for n, (chs, rate) in enumerate(zip(dims, rates)):
            step = 1 if n == 0 or stride >= output_stride else 2
            first = 1 if dilation == 1 else 2
            dilation = dilation * 2 if n and step == 1 else dilation
            stride *= step
            blocks = [InvertedResidual(in_chs, chs, step, first, rate[0], **dd)]
            if n == 1:
                blocks.append(InvertedResidual(chs, chs, drop_path=rate[1], **dd))
            if n >= 2:
                dim = make_divisible(CHANNELS[n] // 2 * width, 8)
                tokens = tuple(-(-n // (stride * p)) for n, p in zip(size, PATCH))
                units = tuple(_attention(attention, dim, num_latent_tokens, sampling, tokens, **dd)
                              for _ in range(DEPTHS[n - 2]))
                blocks.append(MobileViTv2Block(chs, dim, units, dilation, rate[1], sampling, exact_size, **dd))
            stages.append(Stage(*blocks))
            self.feature_info.append(dict(num_chs=chs, reduction=stride, module=f'stages.{n}'))
            in_chs = chs
        self.stages = nn.Sequential(*stages)
        self.num_features = in_chs
        self.head = ClassifierHead(in_chs, num_classes, global_pool, drop_rate, **dd)
        self.head_hidden_size = pooled_width(self.head)
        self.weight_init = weight_init
        if weight_init == 'kaiming':
            self.apply(init_kaiming)
        else:
            self.head.apply(init_xavier)

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """A new classifier (none for 0), its weights random; `global_pool` None keeps the pooling.

        Raises:
            ValueError: a number of classes or a pooling that is not allowed.
        """
        check(type(self).__name__, self.OPTIONS, {'num_classes': num_classes})
        if global_pool is not None:
            check_pool(global_pool, num_classes)
        super().reset_classifier(num_classes, global_pool)
        if self.weight_init == 'authors':
            self.head.apply(init_xavier)

    def group_matcher(self, coarse: bool = False) -> Dict[str, object]:
        """Patterns for layer decay: the stem, then every stage or every block."""
        return dict(stem=r'^stem', blocks=r'^stages\.(\d+)' if coarse else r'^stages\.(\d+)\.(\d+)')

    @torch.no_grad()
    def context_scores(self, x: Tensor) -> Dict[str, Tensor]:
        """Where each layer's context comes from (Appendix D), in evaluation mode.

        Args:
            x: (B, in_chans, H, W).

        Returns:
            For each layer, by its name ('stages.2.1.transformer.0', ...), scores (B, L, H', W') on its stage's map, at
            least float32; those of each group of tokens sum to 1.

        Raises:
            ValueError: the model has another attention.
        """
        layers = {name: layer for name, layer in self.named_modules() if isinstance(layer, TransformerLayer)}
        if not all(isinstance(layer.attn, SeparableSelfAttention) for layer in layers.values()):
            raise ValueError("context scores belong to attention='separable', and this model has another")
        found: Dict[str, Tensor] = {}

        def keep(name: str, unit: SeparableSelfAttention, inputs: Tuple[Tensor, ...]) -> None:
            found[name] = unit.scores(inputs[0])

        handles = [layer.attn.register_forward_pre_hook(partial(keep, name)) for name, layer in layers.items()]
        modes = [(module, module.training) for module in self.modules()]
        blocks = [(block, block.exportable) for block in self.modules() if isinstance(block, MobileViTv2Block)]
        try:
            self.eval()                                  # no running statistics change
            for block, _ in blocks:
                block.exportable = False                 # scores are wanted where the tokens lie, not folded
            self.forward_features(x)
        finally:
            for module, training in modes:
                module.training = training
            for block, exportable in blocks:
                block.exportable = exportable
            for handle in handles:
                handle.remove()
        return found

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """timm's key names, from those of the authors' files: of a classifier, or of the `encoder.` of their detectors
        and segmenters, whose heads are left out."""
        return to_timm_keys(weights)


def _attention(kind: str, dim: int, num_latent_tokens: int, sampling: str, tokens: Tuple[int, int], **dd: Any
               ) -> nn.Module:
    if kind == 'separable':
        return SeparableSelfAttention(dim, num_latent_tokens, PATCH[0], sampling, **dd)
    return MultiHeadSelfAttention(dim, **dd) if kind == 'mha' else LinformerSelfAttention(dim, tokens, **dd)


def _cfg(**kwargs: Any) -> Dict[str, Any]:
    return {'num_classes': 1000, 'input_size': (3, 256, 256), 'pool_size': (8, 8), 'crop_pct': 0.888,
            'interpolation': 'bicubic', 'mean': (0., 0., 0.), 'std': (1., 1., 1.), 'fixed_input_size': False,
            'first_conv': 'stem.conv', 'classifier': 'head.fc', 'license': 'cvnets-license',
            'paper_ids': 'arXiv:2206.02680', **kwargs}


_SIZES = tuple(ARCHS)[:-1]
_384 = dict(input_size=(3, 384, 384), pool_size=(12, 12), crop_pct=1.0)
default_cfgs = generate_default_cfgs({
    **{f'subquad_mobilevitv2_{size}.{tag}': _cfg(hf_hub_id=f'timm/mobilevitv2_{size}.{tag}', **options)
       for tag, sizes, options in (('cvnets_in1k', _SIZES, {}), ('cvnets_in22k_ft_in1k', _SIZES[4:], {}),
                                   ('cvnets_in22k_ft_in1k_384', _SIZES[4:], _384)) for size in sizes},
    'test_mobilevitv2.untrained': _cfg(input_size=(3, 64, 64), pool_size=(2, 2), crop_pct=1.0),
})


def _build(name: str, pretrained: bool, **kwargs: Any) -> MobileViTv2:
    return build_model_with_cfg(MobileViTv2, name, pretrained, pretrained_filter_fn=pretrained_filter(**kwargs),
                                feature_cfg=dict(out_indices=(0, 1, 2, 3, 4), flatten_sequential=True), **kwargs)


@register_model
def subquad_mobilevitv2_050(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-0.5: 1.4 M parameters, 0.5 GMACs at 256."""
    return _build('subquad_mobilevitv2_050', pretrained, **{**ARCHS['050'], **kwargs})


@register_model
def subquad_mobilevitv2_075(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-0.75: 2.9 M parameters, 1.0 GMACs at 256."""
    return _build('subquad_mobilevitv2_075', pretrained, **{**ARCHS['075'], **kwargs})


@register_model
def subquad_mobilevitv2_100(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-1.0: 4.9 M parameters, 1.8 GMACs at 256."""
    return _build('subquad_mobilevitv2_100', pretrained, **{**ARCHS['100'], **kwargs})


@register_model
def subquad_mobilevitv2_125(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-1.25: 7.5 M parameters, 2.8 GMACs at 256."""
    return _build('subquad_mobilevitv2_125', pretrained, **{**ARCHS['125'], **kwargs})


@register_model
def subquad_mobilevitv2_150(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-1.5: 10.6 M parameters, 4.0 GMACs at 256."""
    return _build('subquad_mobilevitv2_150', pretrained, **{**ARCHS['150'], **kwargs})


@register_model
def subquad_mobilevitv2_175(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-1.75: 14.3 M parameters, 5.5 GMACs at 256."""
    return _build('subquad_mobilevitv2_175', pretrained, **{**ARCHS['175'], **kwargs})


@register_model
def subquad_mobilevitv2_200(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-2.0: 18.4 M parameters, 7.2 GMACs at 256."""
    return _build('subquad_mobilevitv2_200', pretrained, **{**ARCHS['200'], **kwargs})


@register_model
def test_mobilevitv2(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """A MobileViTv2 of a few hundred thousand parameters, for tests and demonstrations."""
    return _build('test_mobilevitv2', pretrained, **{**ARCHS['test'], **kwargs})
