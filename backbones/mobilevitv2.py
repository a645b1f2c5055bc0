"""MobileViTv2: inverted residuals and, from stride 8 on, transformer layers with separable self-attention.

Mehta & Rastegari, "Separable Self-attention for Mobile Vision Transformers", TMLR 2023, arXiv 2206.02680, and the
authors' library cvnets. The parameter names are timm's, so that timm's weights on the Hugging Face Hub load unchanged.
The keys of the authors' files are translated.

The differences from timm's model do not change the published networks: separable attention works on the map, without
regrouping its tokens, stochastic depth acts on residual branches only, and new networks are initialized differently
(`weight_init`).
"""
import warnings
from collections import OrderedDict
from functools import partial
from typing import Annotated, Any, Dict, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead, DropPath, calculate_drop_path_rates, make_divisible
from timm.models import generate_default_cfgs, register_model, register_notrace_module
from torch import Tensor, nn

from ..kernels.common.patches import fold_patches, unfold_patches
from ._timm import checkpoint_seq, pooled_width
from .blocks import check_image, check_pool, forward_in_parts
from .mixers import LinformerSelfAttention, MultiHeadSelfAttention, SeparableSelfAttention
from .mixers.separable import LatentTokens, Sampling, check_source
from .observation import observe_inputs
from .options import Flag, ImageSize, InChans, NumClasses, Rate, checked, number, one_of
from .timm_interface import TimmInterface, build_model, image_cfg, init_kaiming, init_xavier, published_cfgs
from .weights.mobilevitv2_keys import DEPTHS, to_cvnets_keys, to_timm_keys

__all__ = ['MobileViTv2']

CHANNELS = (64, 128, 256, 384, 512)
PATCH = (2, 2)
# The authors' networks by the ending of their names, and a small one for tests.
ARCHS: Dict[str, Dict[str, Any]] = {
    **{f'{width:03d}': dict(width=width / 100) for width in range(50, 225, 25)},
    'test': dict(width=0.25),
}


class ConvNormAct(nn.Module):
    """Convolution without bias, BatchNorm and, with `act`, SiLU: (B, C, H, W) -> (B, C', H/stride, W/stride)."""

    def __init__(
            self,
            in_chs: int,
            out_chs: int,
            kernel_size: int = 1,
            stride: int = 1,
            dilation: int = 1,
            groups: int = 1,
            act: bool = True,
            device=None,
            dtype=None,
    ):
        super().__init__()
        self.conv = nn.Conv2d(
            in_chs,
            out_chs,
            kernel_size,
            stride,
            padding=kernel_size // 2 * dilation,
            dilation=dilation,
            groups=groups,
            bias=False,
            device=device,
            dtype=dtype,
        )
        self.bn = nn.BatchNorm2d(out_chs, device=device, dtype=dtype)
        self.act = nn.SiLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class MobileStem(ConvNormAct):
    """3 x 3 convolution of stride 2: (B, in_chans, H, W) -> (B, C, ceil(H/2), ceil(W/2)), channels-last in memory."""

    def forward(self, x: Tensor) -> Tensor:
        x = check_image(x, self.conv.in_channels)
        return super().forward(x.contiguous(memory_format=torch.channels_last))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: 1 x 1 to twice the channels, depthwise 3 x 3, linear 1 x 1.

    The block adds its input if the shapes match.
    """

    def __init__(
            self,
            in_chs: int,
            out_chs: int,
            stride: int = 1,
            dilation: int = 1,
            drop_path: float = 0.,
            device=None,
            dtype=None,
    ):
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
    """Transformer layer: x + attention(norm(x)), then x + FFN(norm(x)).

    The norms are over all channels and tokens of an image.
    """

    def __init__(
            self,
            dim: int,
            attention: nn.Module,
            drop_path: float = 0.,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.norm1 = nn.GroupNorm(1, dim, **dd)
        self.attn = attention
        self.norm2 = nn.GroupNorm(1, dim, **dd)
        self.mlp = nn.Sequential(OrderedDict(
            fc1=nn.Conv2d(dim, 2 * dim, 1, **dd),
            act=nn.SiLU(inplace=True),
            fc2=nn.Conv2d(2 * dim, dim, 1, **dd),
        ))
        self.drop_path1, self.drop_path2 = (DropPath(drop_path) if drop_path else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        """Map x to its shape: (B, C, H, W), or (B, C, 4, N) for softmax attention, whose rows are groups of tokens.

        `source` is an argument of the attention. As in the authors' code, the source of cross-attention is not
        normalized.
        """
        x = x + self.drop_path1(self.attn(self.norm1(x), source))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


def to_even_size(x: Tensor) -> Tensor:
    """Resize (B, C, H, W) to the next even height and width, as the authors' code does."""
    height, width = x.shape[2:]
    if height % PATCH[0] == 0 and width % PATCH[1] == 0:
        return x
    size = [-(-n // p) * p for n, p in zip((height, width), PATCH)]         # Inductor cannot scale by n + -n % p
    return F.interpolate(x, size=size, mode='bilinear', align_corners=True)


@register_notrace_module
class MobileViTv2Block(nn.Module):
    """Depthwise 3 x 3, linear map to the layers' width, transformer layers, norm, linear map back.

    The output has the shape of the input (B, C, H, W). Odd sides grow by one, as in the authors' code, unless
    `exact_size` is set.

    Attributes:
        grouped: whether the layers get a row of tokens for each group, (B, dim, 4, N), as softmax attention needs them.
    """

    def __init__(
            self,
            chs: int,
            dim: int,
            attentions: Tuple[nn.Module, ...],
            dilation: int = 1,
            drop_path: float = 0.,
            sampling: str = 'pixel',
            exact_size: bool = False,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.conv_kxk = ConvNormAct(chs, chs, 3, dilation=dilation, groups=chs, **dd)
        self.conv_1x1 = nn.Conv2d(chs, dim, 1, bias=False, **dd)
        self.transformer = nn.Sequential(*(TransformerLayer(dim, unit, drop_path, **dd) for unit in attentions))
        self.norm = nn.GroupNorm(1, dim, **dd)
        self.conv_proj = ConvNormAct(dim, chs, act=False, **dd)
        self.sampling, self.exact_size = sampling, exact_size
        self.grouped = not isinstance(attentions[0], SeparableSelfAttention)

    def forward_tokens(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        """Return the tokens (B, dim, H, W) after the last norm.

        Args:
            x: feature map (B, C, H, W).
            source: tokens (B, dim, H', W') of another image, such as the previous frame. Every layer takes its context
                from them (cross-attention).
        """
        x = self.conv_1x1(self.conv_kxk(x if self.exact_size else to_even_size(x)))
        rows, columns = x.shape[2:]
        context = x if source is None else check_source(x, source)
        if isinstance(self.transformer[0].attn, LinformerSelfAttention):
            self.transformer[0].attn.check_grid(*(-(-n // p) for n, p in zip(context.shape[2:], PATCH)))
        if self.grouped:
            x = fold_patches(x, PATCH, self.sampling)
            source = None if source is None else fold_patches(source, PATCH, self.sampling)
        for layer in self.transformer:
            x = layer(x, source)
        x = self.norm(x)
        return unfold_patches(x, PATCH, self.sampling, rows, columns) if self.grouped else x

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        return self.conv_proj(self.forward_tokens(x, source))


class MobileStage(nn.Sequential):
    """Sequence of blocks."""

    grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.grad_checkpointing:
            return checkpoint_seq(self, x)
        return forward_in_parts(self, super().forward, x)


class MobileViTv2(TimmInterface):
    """MobileViTv2 of any width.

    Args:
        width: factor of the channels (64, 128, 256, 384, 512), from 0.25 to 2.5; the published networks have 0.5 to 2.
        num_latent_tokens: number of latent tokens of separable attention, from 1 to 64.
        attention: 'separable', or, to replace it, 'mha' or 'linformer' (Table 1).
        sampling: the tokens that attend to each other: 'pixel' for those at the same place of their 2 x 2 patch,
            'patch' for those of the same quarter of the map (Appendix E, which does not define it exactly).
        exact_size: keep odd maps. By default, blocks of stride 8 and more resize odd maps up to even sides, as in the
            authors' code: images of 224 x 224 end in 8 x 8.
        output_stride: 8, 16 or 32; below 32 the last stages use dilation instead of strides.
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of input channels.
        global_pool: timm's 'avg', 'max', 'avgmax', 'catavgmax', or '' without a classifier.
        drop_rate: dropout rate before the classifier.
        drop_path_rate: rate of stochastic depth, which rises over blocks and stages; the layers of a block share it.
        img_size: image size of 'linformer' (256 by default); other attentions only check it.
        weight_init: initialization of new weights. 'kaiming' follows the authors' configurations: convolutions as He et
            al. with the fan of the output, biases 0, the classifier from a normal distribution of standard deviation
            0.02. 'authors' reproduces the authors' library: PyTorch's default initialization, and Xavier uniform for
            the classifier. (Its own scheme is never applied, because of a bug.)
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    @checked
    def __init__(
            self,
            width: Annotated[float, number(0.25, 2.5)] = 1.0,
            num_latent_tokens: LatentTokens = 1,
            attention: Annotated[str, one_of('separable', 'mha', 'linformer')] = 'separable',
            sampling: Sampling = 'pixel',
            exact_size: Flag = False,
            output_stride: Annotated[int, one_of(8, 16, 32)] = 32,
            num_classes: NumClasses = 1000,
            in_chans: InChans = 3,
            global_pool: Annotated[str, one_of('avg', 'max', 'avgmax', 'catavgmax', '')] = 'avg',
            drop_rate: Rate = 0.,
            drop_path_rate: Rate = 0.,
            img_size: ImageSize = None,
            weight_init: Annotated[str, one_of('kaiming', 'authors')] = 'kaiming',
            device=None,
            dtype=None,
    ):
        super().__init__(num_classes, in_chans)
        if attention != 'separable' and exact_size:
            raise ValueError(f"exact_size=True requires attention='separable', got attention={attention!r}")
        if attention != 'separable' and num_latent_tokens != 1:
            warnings.warn(f'num_latent_tokens={num_latent_tokens} has no effect with attention={attention!r}',
                          stacklevel=2)
        check_pool(global_pool, num_classes)
        dd = {'device': device, 'dtype': dtype}
        img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size or (256, 256))

        def attention_unit(dim: int, stride: int) -> nn.Module:
            if attention == 'mha':
                return MultiHeadSelfAttention(dim, **dd)
            if attention == 'linformer':
                return LinformerSelfAttention(dim, tuple(-(-n // (stride * p)) for n, p in zip(img_size, PATCH)), **dd)
            return SeparableSelfAttention(dim, num_latent_tokens, PATCH[0], sampling, **dd)

        # The authors' rounding, which has no effect at the published widths.
        in_chs = make_divisible(min(max(32 * width, 16), 64), 8)
        self.stem = MobileStem(in_chans, in_chs, kernel_size=3, stride=2, **dd)
        rates = calculate_drop_path_rates(drop_path_rate, [1, 2, 2, 2, 2], stagewise=True)
        stages, stride, dilation = [], 2, 1
        self.feature_info = []
        for n, rate in enumerate(rates):
            chs = make_divisible(CHANNELS[n] * width, 8 if n else 16)
            step = 1 if n == 0 or stride >= output_stride else 2
            first_dilation = 1 if dilation == 1 else 2
            dilation = dilation * 2 if n and step == 1 else dilation
            stride *= step
            blocks = [InvertedResidual(in_chs, chs, step, first_dilation, drop_path=rate[0], **dd)]
            if n == 1:
                blocks.append(InvertedResidual(chs, chs, drop_path=rate[1], **dd))
            if n >= 2:
                dim = make_divisible(CHANNELS[n] // 2 * width, 8)
                blocks.append(MobileViTv2Block(
                    chs,
                    dim,
                    tuple(attention_unit(dim, stride) for _ in range(DEPTHS[n - 2])),
                    dilation=dilation,
                    drop_path=rate[1],
                    sampling=sampling,
                    exact_size=exact_size,
                    **dd,
                ))
            stages.append(MobileStage(*blocks))
            self.feature_info.append(dict(num_chs=chs, reduction=stride, module=f'stages.{n}'))
            in_chs = chs
        self.stages = nn.Sequential(*stages)
        self.num_features = chs
        self.head = ClassifierHead(self.num_features, num_classes, global_pool, drop_rate, **dd)
        self.head_hidden_size = pooled_width(self.head)
        self.weight_init = weight_init
        if weight_init == 'kaiming':
            self.apply(init_kaiming)
        else:
            self.head.apply(init_xavier)

    def set_input_size(self, img_size: Union[None, int, Tuple[int, int]] = None) -> None:
        """Check an image size, on which no weight depends but those of attention='linformer'.

        Raises:
            ValueError: a side is below 32, or the network has Linformer attention, which is built for one size.
        """
        super().set_input_size(img_size)
        if img_size is not None and any(isinstance(module, LinformerSelfAttention) for module in self.modules()):
            raise ValueError(f'Linformer attention is made for one image size: pass img_size={img_size!r} to '
                             'timm.create_model')

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Replace the classifier by a randomly initialized one; see `TimmInterface.reset_classifier`."""
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
        """Return the context scores of each layer (Appendix D), in evaluation mode.

        Args:
            x: images (B, in_chans, H, W).

        Returns:
            For each layer, by its name ('stages.2.1.transformer.0', ...), the scores (B, L, H', W') on the map of its
            stage, at least float32. The scores of each group of tokens sum to 1.

        Raises:
            ValueError: the model has another attention.
        """
        layers = {name: layer.attn for name, layer in self.named_modules() if isinstance(layer, TransformerLayer)}
        if not all(isinstance(attention, SeparableSelfAttention) for attention in layers.values()):
            raise ValueError("context scores require attention='separable'; this model has another attention")
        return observe_inputs(self, layers, x, SeparableSelfAttention.scores)

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Rename the keys of the authors' files to timm's.

        Of their detectors and segmenters, only the encoder is kept.
        """
        return to_timm_keys(weights)

    def published_state(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        return to_cvnets_keys(weights)


_cfg = partial(
    image_cfg,
    input_size=(3, 256, 256),
    pool_size=(8, 8),
    crop_pct=0.888,
    mean=(0., 0., 0.),
    std=(1., 1., 1.),
    fixed_input_size=False,
    first_conv='stem.conv',
    license='cvnets-license',
    paper_ids='arXiv:2206.02680',
)
default_cfgs = generate_default_cfgs(published_cfgs({
    **{f'subquad_mobilevitv2_{size}': _cfg() for size in ARCHS if size != 'test'},
    'test_mobilevitv2': _cfg(input_size=(3, 64, 64), pool_size=(2, 2), crop_pct=1.0),
}))


@register_model
def subquad_mobilevitv2_050(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-0.5: 1.4 M parameters, 0.5 GMACs at 256."""
    return build_model(MobileViTv2, 'subquad_mobilevitv2_050', pretrained, {**ARCHS['050'], **kwargs}, feature_maps=5)


@register_model
def subquad_mobilevitv2_075(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-0.75: 2.9 M parameters, 1.0 GMACs at 256."""
    return build_model(MobileViTv2, 'subquad_mobilevitv2_075', pretrained, {**ARCHS['075'], **kwargs}, feature_maps=5)


@register_model
def subquad_mobilevitv2_100(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-1.0: 4.9 M parameters, 1.8 GMACs at 256."""
    return build_model(MobileViTv2, 'subquad_mobilevitv2_100', pretrained, {**ARCHS['100'], **kwargs}, feature_maps=5)


@register_model
def subquad_mobilevitv2_125(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-1.25: 7.5 M parameters, 2.8 GMACs at 256."""
    return build_model(MobileViTv2, 'subquad_mobilevitv2_125', pretrained, {**ARCHS['125'], **kwargs}, feature_maps=5)


@register_model
def subquad_mobilevitv2_150(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-1.5: 10.6 M parameters, 4.0 GMACs at 256."""
    return build_model(MobileViTv2, 'subquad_mobilevitv2_150', pretrained, {**ARCHS['150'], **kwargs}, feature_maps=5)


@register_model
def subquad_mobilevitv2_175(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-1.75: 14.3 M parameters, 5.5 GMACs at 256."""
    return build_model(MobileViTv2, 'subquad_mobilevitv2_175', pretrained, {**ARCHS['175'], **kwargs}, feature_maps=5)


@register_model
def subquad_mobilevitv2_200(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """MobileViTv2-2.0: 18.4 M parameters, 7.2 GMACs at 256."""
    return build_model(MobileViTv2, 'subquad_mobilevitv2_200', pretrained, {**ARCHS['200'], **kwargs}, feature_maps=5)


@register_model
def test_mobilevitv2(pretrained: bool = False, **kwargs: Any) -> MobileViTv2:
    """A small MobileViTv2 with a few hundred thousand parameters, for tests and demonstrations."""
    return build_model(MobileViTv2, 'test_mobilevitv2', pretrained, {**ARCHS['test'], **kwargs}, feature_maps=5)
