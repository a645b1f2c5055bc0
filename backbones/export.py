"""Prepare a finished model for exporters: `prepare_for_export` swaps modules for their export forms.

Exporters take the models as they are, because operators choose their export form while a graph is recorded. The pass
gives faster graphs, with fewer operators that ExecuTorch cannot delegate to XNNPACK. It changes results by rounding
only.

MobileViTv2's blocks become linear layers on tokens in rows, with all weights rewritten beforehand. `compose_linear`
makes one of two linear maps in a row.
"""
import copy
from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ..kernels import eos_elementwise
from ..kernels.eos_scan import DecayGenerator
from ..kernels.quadtree_solve.portable import quadtree_solve_maps
from ..kernels.selective_scan import grid_paths
from ..kernels.trees import Level, level_means_export, repeat_to_children, sibling_normalized
from ..kernels.trees.edges import edge_biases
from .mixers import SeparableSelfAttention, TreeMixer
from .mixers.selective import SelectiveScan
from .mixers.tree import EDGE_DIM
from .mobilevitv2 import PATCH, InvertedResidual, MobileViTv2, MobileViTv2Block, TransformerLayer, to_even_size
from .prepare import NativeTreeMixer, has_hooks, is_plain
from .prepare_gpu import OneProductTreeMixer

GROUPS = PATCH[0] * PATCH[1]


def _bypass(*layers: nn.Module) -> bool:
    return is_plain(*layers) and not any(map(has_hooks, layers))


class ImageNorm(nn.Module):
    """GroupNorm with one group and without weights, for tokens (B * tokens, C) of B images."""

    def __init__(self, norm: nn.GroupNorm):
        super().__init__()
        self.eps = norm.eps

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        # As one channel, because for several channels the graph would get weights of 1 and biases of 0.
        return F.group_norm(x.reshape(-1, 1, tokens * x.shape[1]), 1, eps=self.eps).reshape(-1, x.shape[1])


class ExportLayer(nn.Module):
    """TransformerLayer with separable attention on tokens (B * tokens, C), where each group's tokens are consecutive.

    The weights and biases of the norms are folded into the linear layers after them. Keys are not computed: their map
    is applied to the context of the inputs, because scores sum to 1. The bias of the queries has no effect on scores.
    """

    def __init__(self, layer: TransformerLayer):
        super().__init__()
        dim, latent = layer.norm1.num_channels, layer.attn.num_latent_tokens
        self.norm1, self.norm2 = ImageNorm(layer.norm1), ImageNorm(layer.norm2)
        weight, bias = _fold_affine(layer.norm1, layer.attn.qkv_proj)
        self.query = _linear(weight[:latent], None)
        self.key, self.value = (_linear(weight[n:n + dim], bias[n:n + dim]) for n in (latent, latent + dim))
        self.out = _linear(layer.attn.out_proj.weight, layer.attn.out_proj.bias)
        self.fc1 = _linear(*_fold_affine(layer.norm2, layer.mlp.fc1))
        self.fc2 = _linear(layer.mlp.fc2.weight, layer.mlp.fc2.bias)

    def scores(self, x: Tensor, row: int) -> Tensor:
        """Return the context scores (B * groups, 1, row) for groups of `row` tokens."""
        logits, latent = self.query(x), self.query.out_features
        if latent == 1:
            return logits.reshape(-1, 1, row).softmax(-1)
        return logits.reshape(-1, row, latent).transpose(1, 2).softmax(-1).mean(1, keepdim=True)

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        row, dim = tokens // GROUPS, x.shape[1]
        y = self.norm1(x, tokens)
        context = self.key(torch.bmm(self.scores(y, row), y.reshape(-1, row, dim)))       # (B * groups, 1, C)
        active = self.value(y).relu().reshape(-1, row, dim)
        x = x + self.out((active * context).reshape(-1, dim))
        return x + self.fc2(F.silu(self.fc1(self.norm2(x, tokens))))


class ExportBlock(nn.Module):
    """MobileViTv2Block in evaluation mode: (B, C, H, W) to the same shape, or to the next even height and width.

    Tokens are brought once into the order (image, group, token of the group). Between, they are the rows of a matrix,
    so that 1 x 1 convolutions are linear layers without a change of layout.

    While torch.export records a graph of dynamic height or width, the ordinary block runs, because torch.export cannot
    check the reshapes of this form with unknown sizes in acceptable time. It groups its tokens once, where separable
    attention would group those of each layer.
    """

    def __init__(self, block: MobileViTv2Block):
        super().__init__()
        self.ordinary = block
        block.grouped = True
        for layer in block.transformer:
            layer.attn.patch_size = (GROUPS, 1)              # every row of tokens is a group
        self.transformer = nn.ModuleList(map(ExportLayer, block.transformer))
        self.norm = ImageNorm(block.norm)
        self.proj: nn.Module = nn.Identity()
        if not isinstance(block.conv_proj, nn.Identity):
            conv, norm = block.conv_proj.conv, block.conv_proj.bn
            conv = fuse_conv_bn_eval(conv, norm) if isinstance(norm, nn.BatchNorm2d) else conv
            self.proj = _linear(*_fold_affine(block.norm, conv))

    def forward(self, x: Tensor) -> Tensor:
        if not all(isinstance(side, int) for side in x.shape[2:]):
            return self.ordinary(x)
        x = self.ordinary.conv_1x1(self.ordinary.conv_kxk(to_even_size(x)))
        height, width = x.shape[2:]
        tokens, sampling = height * width, self.ordinary.sampling
        x = to_groups(x.permute(0, 2, 3, 1), sampling).reshape(-1, x.shape[1])
        for layer in self.transformer:
            x = layer(x, tokens)
        x = self.proj(self.norm(x, tokens))
        x = to_grid(x.reshape(-1, tokens, x.shape[1]), sampling, height, width)
        # Without a dense copy, PyTorch's average pooling would export a view by strides, for this size only.
        return x.permute(0, 3, 1, 2).contiguous()


class MapLayer(nn.Module):
    """ExportLayer on maps (B, C, groups, tokens of a group)."""

    def __init__(self, layer: ExportLayer):
        super().__init__()
        self.eps = layer.norm1.eps
        for name in ('query', 'key', 'value', 'out', 'fc1', 'fc2'):
            setattr(self, name, _conv(getattr(layer, name)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(x, 1, eps=self.eps)
        scores = self.query(y).softmax(-1)
        scores = scores if scores.shape[1] == 1 else scores.mean(1, keepdim=True)
        context = self.key((y * scores).sum(-1, keepdim=True))                          # (B, C, groups, 1)
        x = x + self.out(self.value(y).relu() * context)
        return x + self.fc2(F.silu(self.fc1(F.group_norm(x, 1, eps=self.eps))))


class MapBlock(nn.Module):
    """ExportBlock for ncnn, which stores eight channels of a map side by side, but eight rows of a matrix.

    Tokens stay maps here, so that the norms, which mix all tokens, need no change of layout.
    """

    def __init__(self, block: ExportBlock):
        super().__init__()
        self.convs = nn.Sequential(block.ordinary.conv_kxk, block.ordinary.conv_1x1)
        self.transformer = nn.Sequential(*map(MapLayer, block.transformer))
        self.eps = block.norm.eps
        self.proj = _conv(block.proj) if isinstance(block.proj, nn.Linear) else block.proj

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs(to_even_size(x))
        height, width = (side // step for side, step in zip(x.shape[2:], PATCH))
        x = F.pixel_unshuffle(x, PATCH[0]).reshape(-1, x.shape[1], GROUPS, height * width)
        x = self.proj(F.group_norm(self.transformer(x), 1, eps=self.eps))
        return F.pixel_shuffle(x.reshape(-1, GROUPS * x.shape[1], height, width), PATCH[0])


class HalvedResidual(nn.Module):
    """InvertedResidual of stride 2 for ncnn, whose layers run one by one: half of the wide map before the depthwise
    convolution stays in a processor's cache. BatchNorm must have been fused.
    """

    def __init__(self, block: InvertedResidual):
        super().__init__()
        self.halves = nn.ModuleList(copy.deepcopy(nn.Sequential(block.conv1_1x1, block.conv2_kxk)) for _ in range(2))
        for n, half in enumerate(self.halves):
            for layer in half:
                layer.conv.weight, layer.conv.bias = (
                    nn.Parameter(values.chunk(2)[n].clone()) for values in (layer.conv.weight, layer.conv.bias))
            half[1].conv.groups //= 2
        self.conv3_1x1 = block.conv3_1x1

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3_1x1(torch.cat([half(x) for half in self.halves], 1))


def with_maps(model: nn.Module) -> nn.Module:
    """Return a copy of an export form for ncnn, with MapBlock and HalvedResidual in MobileViTv2."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, block in list(parent.named_children()):
            if isinstance(block, ExportBlock) and block.ordinary.sampling == 'pixel':
                setattr(parent, name, MapBlock(block).eval())
            elif type(block) is InvertedResidual and block.conv2_kxk.conv.stride == (2, 2) and _bypass(
                    block.conv1_1x1.conv, block.conv2_kxk.conv):
                setattr(parent, name, HalvedResidual(block).eval())
    return model


def to_groups(x: Tensor, sampling: str) -> Tensor:
    """Reorder (B, H, W, C) to (B, H * W, C), where the tokens of each group are consecutive; tensors have rank 4."""
    _, height, width, dim = x.shape
    rows, columns = height // PATCH[0], width // PATCH[1]
    if sampling == 'pixel':
        x = x.reshape(-1, rows, PATCH[0], width * dim).transpose(1, 2)              # (B, pi, rows, W C)
        x = x.reshape(-1, rows * columns, PATCH[1], dim).transpose(1, 2)            # (B pi, pj, rows columns, C)
    else:
        x = x.reshape(-1, rows, PATCH[1], columns * dim).transpose(1, 2)            # (B pi, pj, rows, columns C)
    return x.reshape(-1, height * width, dim)


def to_grid(x: Tensor, sampling: str, height: int, width: int) -> Tensor:
    """Invert `to_groups`: (B, H * W, C) to (B, H, W, C)."""
    dim = x.shape[2]
    rows, columns = height // PATCH[0], width // PATCH[1]
    if sampling == 'pixel':
        x = x.reshape(-1, PATCH[1], rows * columns, dim).transpose(1, 2)
        x = x.reshape(-1, PATCH[0], rows, width * dim).transpose(1, 2)
    else:
        x = x.reshape(-1, PATCH[1], rows, columns * dim).transpose(1, 2)
    return x.reshape(-1, height, width, dim)


@register_notrace_module
class ExportTreeMixer(TreeMixer):
    """TreeMixer in evaluation mode on maps (B, C, H, W), with tensors of rank 4 at most.

    A padded batch has no export form.
    """

    @staticmethod
    def convert(mixer: TreeMixer) -> None:
        """Give a mixer the export form, in place."""
        mixer.__class__ = ExportTreeMixer
        like = mixer.value.weight
        # Weights of convolutions, which exporters need as constants.
        mixer.register_buffer('head_to_channels', like.new_ones(len(like), 1, 1, 1), persistent=False)
        mixer.register_buffer('dots', like.new_full((mixer.num_heads, EDGE_DIM, 1, 1), EDGE_DIM ** -0.5),
                              persistent=False)

    def forward(self, x: Tensor, mask: Optional[Tensor] = None, depth: Optional[int] = None,
                shift: Optional[Tuple[int, int]] = None) -> Tensor:
        if mask is not None:
            return super().forward(x, mask, depth, shift)
        y = self.solve_maps(x, self.levels(*x.shape[1:3])).permute(0, 2, 3, 1)
        return self.out(F.silu(self.gate(x)) * y)

    def solve_maps(self, x: Tensor, levels: Sequence[Level]) -> Tensor:
        """Return the solution at the leaves, (B, C, H, W), computed with channels-first maps for exporters."""
        values = level_means_export(self.value(x).permute(0, 3, 1, 2), levels)
        bias = self._biases()
        logits: List[Tensor] = [edge_biases(bias, n, level) for n, level in enumerate(levels[:-1])]
        if self.query is not None:
            query, key = (level_means_export(linear(x).permute(0, 3, 1, 2), levels)
                          for linear in (self.query, self.key))
            products = (query[n] * repeat_to_children(key[n + 1], level) for n, level in enumerate(levels[:-1]))
            logits = [F.conv2d(product, self.dots, groups=self.num_heads) + bias
                      for product, bias in zip(products, logits)]
        if self.parametrization == 'laplacian':
            edges = [F.softplus(logit) for logit in logits]
        elif self.parametrization == 'symmetric':
            edges = [sibling_normalized(logit, level, self.rho) for logit, level in zip(logits, levels)]
        else:
            edges = logits

        def spread(numbers: Tensor) -> Tensor:
            """Repeat a head's number for each of its channels."""
            return F.conv2d(numbers, self.head_to_channels, groups=self.num_heads)

        return quadtree_solve_maps(values, edges, self.parametrization, levels, spread)[0]


@register_notrace_module
class ExportScan(SelectiveScan):
    """SelectiveScan whose paths are the heads of one recurrence.

    Tensors have four dimensions at most, and a graph unrolls one scan in place of one for each path."""

    def forward(self, grid: Tensor) -> Tensor:
        orders, dtype = [grid_paths.PATHS[path] for path in self.paths], self.A_log.dtype

        def turned(x: Tensor, reverse: bool) -> Tensor:
            return x.flip(2) if reverse else x

        # Tokens in the order of each path, (B, P, T, C).
        u = torch.cat([turned(grid_paths.to_lines(grid, columns), reverse) for columns, reverse in orders], 1)
        weight = self.x_proj.weight.unflatten(0, (len(orders), -1))
        r, b, c = (u @ weight.transpose(1, 2)).tensor_split(self.bounds, -1)
        bias = (self.bias_factor * self.dt_bias).unsqueeze(1)
        step = F.softplus((r @ self.dt_proj.weight.transpose(1, 2)).to(dtype) + bias)
        rates = DecayGenerator(step, self.A_log.exp().transpose(1, 2), 'd', 'exponential')
        y = eos_elementwise(step * u, b.to(dtype), c.to(dtype), generator=rates) + self.D.unsqueeze(1) * u
        # By slices, because LiteRT has no split into one part, which MambaVision's single path would be.
        return sum(grid_paths.to_grid(turned(y[:, n:n + 1], reverse), grid, columns)
                   for n, (columns, reverse) in enumerate(orders)).to(grid.dtype)


@torch.no_grad()
def compose_linear(model: nn.Module) -> None:
    """Make one of two linear maps in a row wherever MobileViTv2 then takes fewer products, in place.

    A stage can end with a 1 x 1 convolution without activation, and the next one, or the classifier behind the average,
    begins with another linear map. The map between them is lost, so nothing can be made of it but the logits, or the
    maps in `out_indices`. BatchNorm must have been fused. Other models are not changed.
    """
    if not isinstance(model, MobileViTv2):
        return
    blocks = [block for stage in model.stages for block in stage]
    kept = [model.stages[n][-1] for n in getattr(model, 'out_indices', ())]
    firsts = [block.conv1_1x1.conv if type(block) is InvertedResidual and not block.residual else None
              for block in blocks[1:]]
    firsts.append(model.head.fc if not kept and model.head.global_pool.pool_type == 'avg' else None)
    for block, first in zip(blocks, firsts):
        if first is None or block in kept or getattr(block, 'residual', False):
            continue
        name = 'conv3_1x1' if isinstance(block, InvertedResidual) else 'conv_proj'
        last = getattr(block, name).conv
        (rows, middle), columns = first.weight.shape[:2], last.weight.shape[1]
        if not _bypass(last, first) or rows * columns > middle * (rows + columns):
            continue
        weight, bias = last.weight.flatten(1), last.bias
        if isinstance(block, MobileViTv2Block):
            weight, bias = _fold_affine(block.norm, last)
            nn.init.ones_(block.norm.weight)
            nn.init.zeros_(block.norm.bias)
        outer = first.weight.double().flatten(1)
        first.bias += outer @ bias.double()
        first.weight = nn.Parameter((outer @ weight.double()).to(weight).unflatten(1, (-1, *first.weight.shape[2:])))
        setattr(first, 'in_features' if isinstance(first, nn.Linear) else 'in_channels', columns)
        setattr(block, name, nn.Identity())


def prepare_for_export(model: nn.Module) -> List[str]:
    """Replace modules of a finished model by their export form, in place.

    These are MobileViTv2 blocks, quad-tree mixers, selective scans, and the DeepLabv3 head.

    Blocks with another attention, with `exact_size`, or with modified layers (adapters, hooks) are kept: they can be
    exported as they are. A model without such blocks or mixers is not changed.

    Args:
        model: any module in evaluation mode, with BatchNorm fused or not.

    Returns:
        The names of all MobileViTv2 blocks that have the export form now.

    Raises:
        ValueError: a module that would be replaced is in training mode.
    """
    if any(isinstance(module, (MobileViTv2Block, TreeMixer)) and module.training for module in model.modules()):
        raise ValueError('the export form is for evaluation mode only; call model.eval() first')
    for module in model.modules():
        if type(module) in (TreeMixer, OneProductTreeMixer, NativeTreeMixer):
            ExportTreeMixer.convert(module)
        elif type(module) is SelectiveScan:
            module.__class__ = ExportScan
        elif hasattr(module, 'export_form'):             # of a head for MMSegmentation, which need not be installed
            module.__class__ = module.export_form
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()) if not isinstance(parent, ExportBlock) else ():
            if isinstance(child, MobileViTv2Block) and _is_supported(child):
                setattr(parent, name, ExportBlock(child).eval())
    return [name for name, module in model.named_modules() if isinstance(module, ExportBlock)]


def _is_supported(block: MobileViTv2Block) -> bool:
    if block.exact_size or not (isinstance(block.conv_proj, nn.Identity) or _bypass(block.conv_proj.conv)):
        return False
    return all(
        type(layer) is TransformerLayer and type(layer.attn) is SeparableSelfAttention
        and _bypass(layer.attn.qkv_proj, layer.attn.out_proj, layer.mlp.fc1, layer.mlp.fc2)
        for layer in block.transformer
    )


def _fold_affine(norm: nn.GroupNorm, conv: nn.Module) -> Tuple[Tensor, Tensor]:
    """Return weight and bias of a 1 x 1 convolution that includes the norm's weight and bias before it."""
    weight = conv.weight.detach().double().flatten(1)
    bias = 0 if conv.bias is None else conv.bias.detach().double()
    folded = weight * norm.weight.detach().double(), bias + weight @ norm.bias.detach().double()
    return tuple(x.to(conv.weight.dtype) for x in folded)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a linear layer with weight (D, C) or (D, C, 1, 1) and bias (D,) or None."""
    weight = weight.detach().flatten(1)
    linear = nn.utils.skip_init(nn.Linear, *weight.T.shape, bias is not None, device=weight.device,
                                dtype=weight.dtype)
    linear.load_state_dict({'weight': weight} if bias is None else {'weight': weight, 'bias': bias})
    return linear


def _conv(linear: nn.Linear) -> nn.Conv2d:
    """Return the 1 x 1 convolution that does with channels what a linear layer does."""
    conv = nn.utils.skip_init(nn.Conv2d, linear.in_features, linear.out_features, 1, bias=linear.bias is not None,
                              device=linear.weight.device, dtype=linear.weight.dtype)
    conv.load_state_dict({**linear.state_dict(), 'weight': linear.weight[:, :, None, None]})
    return conv
