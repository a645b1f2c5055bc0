"""Put the token mixers of this package into timm's ViT, EVA and Swin models: `subquad.graft` and `subquad.ungraft`."""
from numbers import Integral
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar, Union

import torch
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from .mixers import EosMixer, TreeMixer
from .mixers.choices import find_mixer
from .mixers.grafted import MIXER, POLYLINE, Grid, NeutralDecay
from .mixers.separable import SeparableMixer
from .timm_interface import init_linear

Model = TypeVar('Model', bound=nn.Module)
Layers = Union[None, Sequence[Union[int, str]]]

HOSTS = (VisionTransformer, Eva, SwinTransformer, SwinTransformerV2)
_SWIN_BLOCKS = (SwinTransformerBlock, SwinTransformerV2Block)
_ORIGINAL = {grafted: own for table in (POLYLINE, MIXER) for own, grafted in table.items()}
_ADDED = ('decay', 'mixer', 'gamma', 'grid', 'frozen')
# Names of mixers. 'eos:' with a preset or code is one, too.
NAMES = ('polyline', 'tree', 'tree-symmetric', 'tree-skew', 'eos', 's5', 'separable')
# SiLU of this number is 1, so that a gate with this bias and no weight passes everything.
_OPEN_GATE = 1.2784645427610738


def graft(model: Model, mixer: str = 'polyline', layers: Layers = None) -> Model:
    """Put a mixer of this package into a ViT, EVA or Swin model of timm, in place.

    With 'polyline', attention gets the additive polyline mask (PPMA, section 3, in the form of the published code):

        1/2 softmax(q k' + log L) v + 1/2 softmax(q k' + log L~) v

    The outputs of the model do not change at first (to 1e-5 in float32), because all log decays start at 0. The new
    parameters, `decay.*` of each attention layer, learn from there. Queries, keys, values, projection, norms, rotary
    embedding, relative position bias and Swin's shift mask are the model's own. Class, distillation and register tokens
    neither decay nor are decayed. In Swin, the grid is the window. Where a layer has no such tokens, no bias and no
    dropout, the operator `polyline_attention` runs; elsewhere a dense form, which is exact and needs O(N^2) memory.

    The other mixers replace attention, so the outputs change. Their output is multiplied by `gamma`, one number for
    each channel, which starts at 0: the tokens of the image exchange nothing at first, and training starts from there.
    Their values and projection start as copies of the model's if these have C x C weights, and their gates start open.
    Class, distillation and register tokens keep the model's own attention to all tokens, at a cost of O(N); the tokens
    of the image do not see them. In Swin, the mixer runs on the whole map instead of windows. Without class,
    distillation and register tokens, the model's own attention is not used, and its parameters are frozen.

    Args:
        model: a `VisionTransformer`, `Eva`, `SwinTransformer` or `SwinTransformerV2` of timm, or a module that contains
            one, such as that of `features_only=True`. Any grid of patches works, also with `dynamic_img_size`.
        mixer: 'polyline', 'tree', 'tree-symmetric', 'tree-skew', 'eos', 'eos:' with a preset or code of `EosMixer`,
            's5' or 'separable'.
        layers: indices of blocks, from the first or, if negative, from the last, or their names, such as 'blocks.3' or
            'layers.0.blocks.1'; None for all.

    Returns:
        The model. Names of its own parameters stay; create the optimizer after this call.

    Raises:
        TypeError: `model` contains none or several of these models, or a layer has parameters of several dtypes.
        ValueError: the mixer or a layer does not exist, the model is grafted already, drops patches, or has heads that
            do not divide its width.
    """
    build = find_mixer(mixer)
    if build is None or mixer not in NAMES and not mixer.startswith('eos:'):
        raise ValueError(f"mixer must be one of {', '.join(map(repr, NAMES))} or 'eos:' with a preset or code of "
                         f'EosMixer, got {mixer!r}')
    host = _host(model)
    if any(type(module) in _ORIGINAL for module in host.modules()):
        raise ValueError(f'this {type(host).__name__} is grafted already; call subquad.ungraft(model) first')
    if not isinstance(getattr(host, 'patch_drop', None), (nn.Identity, type(None))):
        raise ValueError(f'this {type(host).__name__} drops patches in training, and a graft needs the whole grid; '
                         'create it with patch_drop_rate=0')
    chosen = _choose(host, _blocks(host), layers)
    for name, block in chosen.items():
        _check_attention(name, block.attn)
    grid = None
    if isinstance(host, (VisionTransformer, Eva)):
        grid = Grid(host.num_prefix_tokens)
        grid.attach(host.patch_embed, chosen.values())
    for number, block in enumerate(chosen.values()):
        if mixer == 'polyline':
            _add_decay(block.attn, grid)
        else:
            _replace(block, grid, build, number)
    return model


def ungraft(model: Model) -> Model:
    """Take out what `graft` put into a model, in place.

    All layers of the model are its own again, with the same parameter objects. So its own weights keep what training
    did to them while it was grafted, and are bit for bit those from before without training. The weights of the graft
    are lost: decays, mixers and their copies of values and projection. Frozen parameters get gradients again.

    Args:
        model: a model that `graft` returned.

    Returns:
        The model.

    Raises:
        TypeError: see `graft`.
        ValueError: the model is not grafted.
    """
    host = _host(model)
    grafted = [module for module in host.modules() if type(module) in _ORIGINAL]
    if not grafted:
        raise ValueError(f'this {type(host).__name__} is not grafted')
    for module in grafted:
        for parameter in getattr(module, 'frozen', ()):
            module.get_parameter(parameter).requires_grad_(True)
        for name in _ADDED:
            if hasattr(module, name):
                delattr(module, name)
        module.__class__ = _ORIGINAL[type(module)]
    for module in host.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, '__self__', None), Grid)]:
            del hooks[key]
    return model


def _host(model: Any) -> nn.Module:
    """Return the model of timm that is, or is inside, `model`; for the stages of a Swin alone, `model` itself."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    found = [module for module in modules if isinstance(module, HOSTS)]
    if not found and any(isinstance(module, _SWIN_BLOCKS) for module in modules):
        return model                                     # features_only=True of Swin has its stages only
    if len(found) != 1:
        came = f'{type(model).__name__}{f", which contains {len(found)} of them" if found else ""}'
        raise TypeError(f"model must be a {', '.join(cls.__name__ for cls in HOSTS[:-1])} or {HOSTS[-1].__name__} of "
                        f'timm, or contain one of them, got {came}')
    return found[0]


def _blocks(host: nn.Module) -> Dict[str, nn.Module]:
    """Return the blocks of a model whose attention can be grafted, by name."""
    return {name.rpartition('.')[0]: host.get_submodule(name.rpartition('.')[0])
            for name, module in host.named_modules() if type(module) in POLYLINE and name.endswith('.attn')}


def _choose(host: nn.Module, blocks: Dict[str, nn.Module], layers: Layers) -> Dict[str, nn.Module]:
    """Return the blocks that `layers` selects, in the order of the model."""
    if not blocks:
        raise ValueError(f'this {type(host).__name__} has no attention that can be grafted: its layers must be '
                         f"{', '.join(dict.fromkeys(cls.__name__ for cls in POLYLINE))} of timm")
    names, count = list(blocks), len(blocks)
    allowed = f"indices from {-count} to {count - 1} or names from '{names[0]}' to '{names[-1]}'"
    if layers is None:
        return blocks
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence) or not layers:
        raise ValueError(f'layers must be None or a list of {allowed}, got {layers!r}')
    chosen: List[str] = []
    for layer in layers:
        name: Optional[str] = None
        if isinstance(layer, Integral) and not isinstance(layer, bool) and -count <= layer < count:
            name = names[layer]
        elif isinstance(layer, str):
            name = layer.removesuffix('.attn')
        if name not in blocks:
            raise ValueError(f'layers must be None or a list of {allowed}, got the entry {layer!r}')
        chosen.append(name)
    return {name: block for name, block in blocks.items() if name in chosen}


def _check_attention(name: str, attn: nn.Module) -> None:
    """Raise an error if a layer has heads or dtypes that no mixer takes; see `graft`."""
    dim, heads = attn.proj.out_features, attn.num_heads
    if dim % heads:
        raise ValueError(f'{name} cannot be grafted: its {heads} heads do not divide its {dim} channels')
    dtypes = sorted({str(parameter.dtype) for parameter in attn.parameters()})
    if len(dtypes) > 1:
        raise TypeError(f"{name} cannot be grafted: its attention has parameters of {' and '.join(dtypes)}")


def _add_decay(attn: nn.Module, grid: Optional[Grid]) -> None:
    """Give an attention layer the polyline mask."""
    weight = attn.proj.weight
    decay = NeutralDecay(attn.proj.out_features, attn.num_heads, device=weight.device, dtype=weight.dtype)
    attn.decay = decay.train(attn.training)
    if grid is not None:
        attn.grid = grid
    attn.__class__ = POLYLINE[type(attn)]


def _replace(block: nn.Module, grid: Optional[Grid], build: Callable[..., nn.Module], number: int) -> None:
    """Put a mixer in place of a block's attention; `number` is that of the block among the grafted ones."""
    attn, dim, weight = block.attn, block.attn.proj.out_features, block.attn.proj.weight
    dd = {'device': weight.device, 'dtype': weight.dtype}
    mixer = build(stage=0, block=number, dim=dim, num_heads=attn.num_heads, **dd).apply(init_linear)
    with torch.no_grad():
        _START[type(mixer)](mixer, _values(attn), (weight, attn.proj.bias))
    owner = attn if grid is not None else block              # Swin's attention sees windows, its block the whole map
    unused = () if grid is not None and grid.prefix else attn.named_parameters()
    prefix = '' if owner is attn else 'attn.'
    owner.frozen = [f'{prefix}{name}' for name, parameter in unused if parameter.requires_grad]
    for name in owner.frozen:
        owner.get_parameter(name).requires_grad_(False)
    owner.mixer = mixer.train(attn.training)
    owner.gamma = nn.Parameter(torch.zeros(dim, **dd))
    if grid is not None:
        owner.grid = grid
    owner.__class__ = MIXER[type(owner)]


Affine = Tuple[Tensor, Optional[Tensor]]


def _values(attn: nn.Module) -> Affine:
    """Return weight and bias of the values of an attention layer of timm."""
    if attn.qkv is None:
        return attn.v_proj.weight, attn.v_proj.bias
    rows = attn.qkv.out_features // 3
    bias = getattr(attn, 'v_bias', None)
    if bias is None and attn.qkv.bias is not None:
        bias = attn.qkv.bias[-rows:]
    return attn.qkv.weight[-rows:], bias


def _copy(weight: Tensor, bias: Tensor, source: Affine) -> None:
    """Copy an affine map into slices of parameters, if it has their size."""
    if source[0].numel() == weight.numel() and len(source[0]) == len(weight):
        weight.copy_(source[0].view_as(weight))
        bias.zero_() if source[1] is None else bias.copy_(source[1])


def _start_gated(mixer: nn.Module, values: Affine, projection: Affine) -> None:
    """Let a mixer start as the projection of the mixed values."""
    _copy(mixer.value.weight, mixer.value.bias, values)
    _copy(mixer.out.weight, mixer.out.bias, projection)
    mixer.gate.weight.zero_()
    mixer.gate.bias.fill_(_OPEN_GATE)


def _start_separable(mixer: nn.Module, values: Affine, projection: Affine) -> None:
    """Let separable attention start as the projection of the context, a weighted mean of the values."""
    weight, bias, dim = mixer.qkv_proj.weight, mixer.qkv_proj.bias, mixer.out_proj.out_channels
    _copy(weight[1:1 + dim], bias[1:1 + dim], values)
    weight[1 + dim:].zero_()
    bias[1 + dim:].fill_(1.0)
    _copy(mixer.out_proj.weight, mixer.out_proj.bias, projection)


_START: Dict[type, Callable[..., None]] = {TreeMixer: _start_gated, EosMixer: _start_gated,
                                           SeparableMixer: _start_separable}
