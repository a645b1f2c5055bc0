"""The presets of `lab.benchmark`: what each one measures, and its targets."""
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from subquad.tools.bench.comparisons import compare_models, compare_operator

from . import denoising
from .attention_units import attention_units
from .detector import detector
from .exported_models import exported_models
from .growth import line_growth, scan_against_mask, scan_growth, tree_growth
from .line_memory import line_memory
from .plots import plot


@dataclass(frozen=True)
class Preset:
    """A measurement with a name.

    Attributes:
        name: What is typed.
        description: What is measured, in words.
        measure: Function (rounds, **options, **targets) -> record without its metadata.
        options: What is measured, as keywords of `measure`.
        targets: The targets, as keywords of `measure`.
        repeats: Rounds of timing by default.
        processes: Processes by default; the medians over them are kept.
        family: The model family whose card shows the results.
        device: 'cpu' or 'cuda'.
        draw: Function (record, path) that draws a picture of the record.
    """
    name: str
    description: str
    measure: Callable[..., Dict[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 50
    processes: int = 1
    family: str = ''
    device: str = 'cpu'
    draw: Optional[Callable[[Dict[str, Any], Path], None]] = None

    def run(self, repeats: int) -> Dict[str, Any]:
        """Measure, and return the record without its metadata."""
        return self.measure(repeats, **self.options, **self.targets)


def _operator(family: str, name: str, description: str, least: Optional[Mapping[str, float]] = None,
              targets: Optional[Mapping[str, Any]] = None, repeats: int = 50, processes: int = 1,
              **options: Any) -> Preset:
    """A comparison of implementations; `least` are targets of the speed-up over the others."""
    return Preset(name, description, compare_operator, options, _targets(least, targets), repeats, processes, family,
                  options.get('device', 'cpu'))


def _models(family: str, name: str, description: str, names: Sequence[str], size: Tuple[int, int], batch: int,
            repeats: int, least: Optional[Mapping[str, float]] = None, targets: Optional[Mapping[str, Any]] = None,
            processes: int = 1, **options: Any) -> Preset:
    """A comparison of models; `least` are targets of the speed-up over the others."""
    return Preset(name, description, compare_models, dict(names=tuple(names), size=size, batch=batch, **options),
                  _targets(least, targets), repeats, processes, family, options.get('device', 'cpu'))


def _targets(least: Optional[Mapping[str, float]], others: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
    return {**({'min_speedup': dict(least)} if least else {}), **(others or {})}


_SIDES = (16, 32, 48, 64, 96, 128, 192, 256)
_SWIN, _CONVNEXT, _VIT = 'swin_tiny_patch4_window7_224', 'convnext_tiny', 'vit_small_patch16_224'
_TIMM = (_SWIN, _CONVNEXT, 'mobilevit_s', 'mobilevitv2_100', _VIT, 'deit_tiny_patch16_224')
_ANY_SIZE = (_SWIN, _CONVNEXT, 'mobilevitv2_100')
_TINY = (('PPMA-Tiny', 'ppma_tiny', 'ppma'), ('Myo-Tiny', 'myo_tiny', 'myo'), ('LCSM-Tiny', 'lcsm_tiny', 'lcsm'),
         ('MobileViTv2-1.0', 'subquad_mobilevitv2_100', 'mobilevitv2'))

_PPMA = [
    _operator('ppma', 'polyline_attention-50x80',
              'polyline attention and the dense formula, 50 x 80 tokens, 8 heads of 32 channels',
              {'dense': 2.5}, dict(max_memory_mb=300), 7, op='polyline_attention', grid=(50, 80),
              names=('portable', 'dense')),
    _operator('ppma', 'polyline_attention-14x14', 'polyline attention and the dense formula, 14 x 14 tokens, batch 8',
              {'dense': 1}, None, 30, op='polyline_attention', grid=(14, 14), batch=8, names=('portable', 'dense')),
    Preset('polyline_scan-growth', 'growth of the time of the polyline scan, 32 x 32 to 256 x 256 tokens',
           scan_growth, dict(sides=(32, 64, 128, 256)), dict(max_exponent=1.1), 15, 1, 'ppma'),
    _models('ppma', 'ppma_tiny-800x1280', 'PPMA-Tiny and its floor, one 800 x 1280 image', ('ppma_tiny',),
            (800, 1280), 1, 7, None, dict(max_over_floor=5, max_memory_mb=600)),
    _models('ppma', 'ppma_tiny-224', 'PPMA-Tiny and its floor, eight 224 x 224 images', ('ppma_tiny',),
            (224, 224), 8, 15, None, dict(max_over_floor=2.4)),
    Preset('figure10', "L x by the N x N mask and by Algorithm 1 (PPMA's Figure 10), with a plot",
           scan_against_mask, dict(sides=_SIDES, dense_until=64), {}, 7, 1, 'ppma', draw=plot),
    _models('ppma', 'models-224', 'PPMA-Tiny and timm models of its size and smaller, eight 224 x 224 images',
            ('ppma_tiny', *_TIMM), (224, 224), 8, 7),
    _models('ppma', 'models-800x1280', 'PPMA-Tiny and timm models that take any size, one 800 x 1280 image',
            ('ppma_tiny', *_ANY_SIZE), (800, 1280), 1, 3),
    _models('ppma', 'models-224-train', 'a training step of the models of models-224, eight 224 x 224 images',
            ('ppma_tiny', *_TIMM), (224, 224), 8, 5, train=True),
    Preset('mask-rcnn_ppma-t-800x1280',
           'inference of Mask R-CNN with PPMA-Tiny, one 800 x 1280 image: memory and share of the backbone',
           detector, dict(config='mask-rcnn_ppma-t_fpn_1x_coco', size=(800, 1280)), {}, 3, 1, 'ppma'),
]

_RMT = [_models('rmt', 'rmt', 'RMT-Tiny, PPMA-Tiny and timm models of their accuracy, one 224 x 224 image',
                ('rmt_tiny', 'ppma_tiny', _SWIN, _CONVNEXT), (224, 224), 1, 15, {'ppma_tiny': 1})]

_VIM = [_models('vim', 'vim', 'Vim-Tiny and timm models, one 224 x 224 image', ('vim_tiny', _SWIN, _CONVNEXT),
                (224, 224), 1, 15, {})]

_MAMBAVISION = [
    _models('mambavision', 'mambavision', 'MambaVision-Tiny and timm models of its accuracy, one 224 x 224 image',
            ('mambavision_tiny', _SWIN, _CONVNEXT), (224, 224), 1, 15, {_CONVNEXT: 0.91})]

_VMAMBA = [_models('vmamba', 'vmamba', 'VMamba-Tiny, its first version, and timm models of their accuracy, one '
                   '224 x 224 image', ('vmamba_tiny_s1l8', 'vmamba_vanilla_tiny', _SWIN, _CONVNEXT), (224, 224), 1, 15,
                   {_CONVNEXT: 0.77})]

_MLLA = [_models('mlla', 'mlla', 'MLLA-Tiny and timm models of its size, one 224 x 224 image',
                 ('mlla_tiny', _SWIN, _CONVNEXT), (224, 224), 1, 15, {_CONVNEXT: 1 / 1.1})]

_SEPARABLE = dict(op='separable_attention', batch=8, heads=1, dim=128, names=('portable', 'eager', 'matmul'))
_MOBILEVITV2 = [
    _operator('mobilevitv2', 'separable_attention-32x32',
              "separable attention of MobileViTv2-1.0's first block, 32 x 32 tokens of 128 channels, batch 8",
              {'eager': 1, 'matmul': 1}, processes=5, **_SEPARABLE, grid=(32, 32)),
    _operator('mobilevitv2', 'separable_attention-sequence',
              'separable attention on sequences of 1,024 tokens of 128 channels, batch 8',
              {'eager': 1, 'matmul': 1}, processes=5, **_SEPARABLE, grid=(1, 1024)),
    *(_models('mobilevitv2', f'mobilevitv2_{width}-batch{batch}',
              f"MobileViTv2-{int(width) / 100:g} and timm's implementation with the same weights, "
              f'{batch} image(s) of 256 x 256',
              (f'subquad_mobilevitv2_{width}', f'mobilevitv2_{width}'), (256, 256), batch, 40 if batch == 1 else 8,
              {f'mobilevitv2_{width}': 0.97}, processes=5)
      for width in ('050', '100', '200') for batch in (1, 8)),
    *(Preset(f'{runtime}-mobilevitv2_{width}',
             f"exported MobileViTv2-{int(width) / 100:g} and timm's implementation with the same weights on "
             f'{title}, one 256 x 256 image, one thread', exported_models,
             dict(name=f'subquad_mobilevitv2_{width}', baseline=f'mobilevitv2_{width}', runtime=runtime),
             dict(max_ratio=1.03, aim=0.9), 40, 5, 'mobilevitv2')
      for runtime, title in (('onnx', 'ONNX Runtime'), ('openvino', 'OpenVINO'), ('executorch', 'ExecuTorch'),
                             ('litert', 'LiteRT (the latter by onnx2tf)'), ('ncnn', 'ncnn'))
      for width in ('050', '100', '200')),
    *(_models('mobilevitv2', f'{mobilevit}-256',
              f"MobileViTv2 and a MobileViT (v1) of about its size, timm's {mobilevit}, one 256 x 256 image",
              (f'subquad_mobilevitv2_{width}', mobilevit), (256, 256), 1, 40)
      for width, mobilevit in (('050', 'mobilevit_xxs'), ('075', 'mobilevit_xs'), ('100', 'mobilevit_s'))),
    Preset('figure1', "the attention units of MobileViTv2's Figure 1 over the number of tokens, with a plot",
           attention_units, dict(tokens=(64, 128, 256, 512, 1024, 2048, 4096)), {}, 30, 1, 'mobilevitv2', draw=plot),
]

_MYO = [
    Preset('quadtree_solve-growth',
           'quad-tree solves of 50,176 tokens of 64 channels, from 64 grids of 28 x 28 to one of 224 x 224',
           tree_growth, dict(sides=(28, 56, 112, 224), tokens=224 * 224), dict(max_growth=1.3, max_gradient_memory=0.5),
           15, 3, 'myo'),
    _models('myo', 'myo_tiny-224', 'Myo-Tiny and PPMA-Tiny, eight 224 x 224 images', ('myo_tiny', 'ppma_tiny'),
            (224, 224), 8, 7),
    Preset('denoising', 'denoising by one linear tree solve over the pixels in Morton, snake, raster and random order',
           denoising.denoising, {}, dict(max_error_ratio=0.95), 2, 1, 'myo', draw=denoising.draw),
]

_LCSM = [
    Preset('eos-growth', 'growth of the time of the recurrences with the length of the line, 1,024 to 16,384 tokens',
           line_growth, dict(lengths=(1024, 4096, 16384)), dict(max_exponent=1.2), 5, 1, 'lcsm'),
    Preset('eos-memory', 'memory of recurrences of full rank and of constant complex ones with gradients, 4,096 '
           'tokens of 64 channels, 32 keys', line_memory, dict(length=4096, keys=32, dim=64), dict(max_share=1 / 8),
           1, 1, 'lcsm'),
    _models('lcsm', 'lcsm_tiny-224', 'LCSM-Tiny, PPMA-Tiny and Myo-Tiny, eight 224 x 224 images',
            ('lcsm_tiny', 'ppma_tiny', 'myo_tiny'), (224, 224), 8, 7),
]

# "Which model?": models of this package and of timm, one image at a time, at three sizes. Of timm's models: ImageNet-1k
# top-1 without further data, in percent, and the image size of the test, as timm lists them
# (results/results-imagenet.csv of huggingface/pytorch-image-models, commit 0173a139).
CHOICE_SIZES = (224, 512, 1024)
CHOICE_OURS = ('ppma_tiny', 'ppma_tiny_crisscross', 'rmt_tiny', 'mlla_tiny', 'vmamba_tiny_s1l8', 'vim_tiny',
               'mambavision_tiny',
               'subquad_mobilevitv2_050', 'subquad_mobilevitv2_100', 'myo_tiny', 'lcsm_tiny')
CHOICE_TIMM: Dict[str, Tuple[float, int]] = {
    'tf_efficientnetv2_b0': (78.4, 224), 'edgenext_small': (81.6, 320), 'convnextv2_nano': (82.5, 288),
    'resnet50': (80.7, 224), _SWIN: (81.4, 224), 'pvt_v2_b2_li': (82.2, 224), _CONVNEXT: (82.7, 288)}
CHOICE = [_models('', f'choice-{side}', f'models of this package and of timm, one {side} x {side} image',
                  (*CHOICE_OURS, *CHOICE_TIMM), (side, side), 1, 7 if side < 1000 else 5) for side in CHOICE_SIZES]

_OTHERS = {'ppma': (_SWIN,)}                          # compared under autocast as well
_AUTOCAST = [
    _models(family, f'{name.removeprefix("subquad_")}-autocast',
            f'{title} under autocast to bfloat16 and in float32, eight 224 x 224 images',
            (f'{name}+autocast', name, *(f'{other}+autocast' for other in _OTHERS.get(family, ()))), (224, 224), 8, 15,
            {name: 1 if family == 'lcsm' else 2, **{f'{other}+autocast': 1 for other in _OTHERS.get(family, ())}},
            processes=3)
    for title, name, family in _TINY]
_COMPILED = [
    _models(family, f'{name.removeprefix("subquad_")}-compiled-batch{batch}',
            f'{title} compiled and eager, {batch} image(s) of 224 x 224',
            (f'{name}+compile', name), (224, 224), batch, 40 if batch == 1 else 15, {name: 0.97})
    for title, name, family in _TINY for batch in (1, 8)]

_ON_GPU = dict(dtype='bfloat16', device='cuda')
_GPU_SEPARABLE = dict(_ON_GPU, op='separable_attention', grid=(32, 32), batch=128, heads=1, dim=128,
                      names=('triton', 'compiled', 'eager'))
_GPU_QUADTREE = dict(_ON_GPU, op='quadtree_solve', grid=(56, 56), batch=64, heads=4, dim=16,
                     names=('triton', 'portable', 'loop'))
_GPU_POLYLINE = dict(_ON_GPU, op='polyline_attention', grid=(50, 80))
_KERNELS = '{} with kernels and with the compiled portable backend, 128 images of 224 x 224, bfloat16'
_GPU_MODELS = ('ppma_tiny+compile', *(f'{name}+compile' for name in (_SWIN, _CONVNEXT, _VIT)), 'ppma_tiny')
_AHEAD_OF = {f'{_SWIN}+compile': 1, f'{_CONVNEXT}+compile': 1}


def _with_kernels(family: str, title: str, name: str, least: float, train: bool) -> Preset:
    return _models(family, f"gpu-{name}-224{'-train' * train}", _KERNELS.format('a training step of ' * train + title),
                   (f'{name}@triton+compile', f'{name}@portable+compile', f'{name}@triton'), (224, 224), 128, 20,
                   {f'{name}@portable+compile': least}, **_ON_GPU, **({'train': True} if train else {}))


_GPU = [
    _operator('mobilevitv2', 'gpu-separable_attention-32x32',
              "separable attention of MobileViTv2-1.0's first block, batch 128, bfloat16",
              targets=dict(min_bandwidth_share=0.75), **_GPU_SEPARABLE),
    _operator('mobilevitv2', 'gpu-separable_attention-32x32-train',
              "separable attention of MobileViTv2-1.0's first block with gradients, batch 128, bfloat16",
              **_GPU_SEPARABLE, backward=True),
    _models('mobilevitv2', 'gpu-mobilevitv2_100-256',
            "MobileViTv2-1.0 and timm's implementation, 128 images of 256 x 256, bfloat16",
            ('subquad_mobilevitv2_100', 'mobilevitv2_100', 'subquad_mobilevitv2_100+compile',
             'mobilevitv2_100+compile'), (256, 256), 128, 20, {'mobilevitv2_100': 1.3}, **_ON_GPU),
    _operator('ppma', 'gpu-polyline_attention-50x80',
              "the fused kernel and PyTorch's attention, 50 x 80 tokens, 8 heads of 32 channels, bfloat16",
              {'sdpa': 8, 'flex': 1.5}, dict(min_memory_saving={'sdpa': 20}),
              **_GPU_POLYLINE, names=('triton', 'sdpa', 'flex', 'compiled', 'dense')),
    _operator('ppma', 'gpu-polyline_attention-50x80-train',
              "the fused kernel and PyTorch's attention with gradients, 50 x 80 tokens, 8 heads of 32 channels, "
              'bfloat16', **_GPU_POLYLINE, backward=True, names=('triton', 'sdpa', 'flex', 'compiled')),
    _operator('ppma', 'gpu-crisscross_attention-56x56',
              "criss-cross attention of PPMA-Tiny's first stage with gradients, batch 64, bfloat16",
              **_ON_GPU, op='crisscross_attention', grid=(56, 56), batch=64, heads=4, dim=16, backward=True,
              names=('triton', 'compiled', 'dense')),
    _operator('ppma', 'gpu-polyline_scan-56x56',
              'the fused scan and the copy bandwidth, 56 x 56 tokens of 64 channels, batch 64',
              targets=dict(min_bandwidth_share=0.6), op='polyline_scan', grid=(56, 56), batch=64, heads=1, dim=64,
              device='cuda', names=('triton', 'portable', 'dense')),
    Preset('gpu-figure10', "PPMA's Figure 10 on a GPU, with a plot", scan_against_mask,
           dict(sides=_SIDES, device='cuda', dense_until=128), {}, 30, 1, 'ppma', 'cuda', plot),
    _operator('myo', 'gpu-quadtree_solve-56x56',
              'the quad-tree solve of 56 x 56 tokens of 64 channels, batch 64, bfloat16',
              targets=dict(min_bandwidth_share=0.5), **_GPU_QUADTREE),
    _operator('myo', 'gpu-quadtree_solve-56x56-train',
              'the quad-tree solve of 56 x 56 tokens of 64 channels with gradients, batch 64, bfloat16',
              **_GPU_QUADTREE, backward=True),
    _with_kernels('ppma', 'PPMA-Tiny', 'ppma_tiny', 2, False),
    _with_kernels('ppma', 'PPMA-Tiny', 'ppma_tiny', 2, True),
    *(_models('ppma', f'gpu-graphs-224-batch{batch}',
              f'tiny models of five families and timm models, not compiled, {batch} image(s) of 224 x 224, bfloat16',
              ('ppma_tiny', 'vmamba_tiny_s1l8', 'myo_tiny', 'lcsm_tiny', 'subquad_mobilevitv2_100', _SWIN, _CONVNEXT,
               _VIT, 'mobilevitv2_100'), (224, 224), batch, 10, **_ON_GPU) for batch in (128, 1)),
    _models('rmt', 'gpu-graphs-published-224',
            'tiny models of three families and a timm model, not compiled, 128 images of 224 x 224, bfloat16',
            ('rmt_tiny', 'mlla_tiny', 'mambavision_tiny', _CONVNEXT), (224, 224), 128, 10, **_ON_GPU),
    _models('ppma', 'gpu-models-224',
            'PPMA-Tiny and timm models of its size, compiled, 128 images of 224 x 224, bfloat16',
            _GPU_MODELS, (224, 224), 128, 20, _AHEAD_OF, **_ON_GPU),
    _models('ppma', 'gpu-models-224-train', 'a training step of the models of gpu-models-224',
            _GPU_MODELS, (224, 224), 128, 20, _AHEAD_OF, **_ON_GPU, train=True),
    _models('ppma', 'gpu-models-800x1280',
            'PPMA-Tiny and timm models that take any size, eight 800 x 1280 images, bfloat16',
            ('ppma_tiny', *_ANY_SIZE), (800, 1280), 8, 20, **_ON_GPU),
    # Recurrences over rows in both directions, beside two flipped causal calls of fla-core.
    *(_operator('lcsm', f"gpu-{op}-{side}x{side}{'-train' * backward}",
                f"{op} over the rows of {side} x {side} tokens in both directions{' with gradients' * backward}, "
                'batch 64, bfloat16, and two calls of fla-core', {'fla': 2 if op == 'eos_elementwise' else 1},
                **_ON_GPU, op=op, grid=(side, side), batch=64, heads=2, dim=32, backward=backward,
                names=('triton', 'fla', 'portable'))
      for op in ('eos_elementwise', 'eos_matmul') for side in (56, 28) for backward in (False, True)),
    _with_kernels('lcsm', 'LCSM-Tiny', 'lcsm_tiny', 1, False),
    _with_kernels('lcsm', 'LCSM-Tiny', 'lcsm_tiny', 1, True),
]

PRESETS = {preset.name: preset for preset in (
    *_PPMA, *_MOBILEVITV2, *_MYO, *_LCSM, *_RMT, *_MLLA, *_VMAMBA, *_VIM, *_MAMBAVISION, *CHOICE, *_AUTOCAST,
    *_COMPILED, *_GPU)}
# What `lab.benchmark` measures by default: on a CPU the presets with a target for time or memory (the target of
# `denoising` is an error; exported models need further packages), on a GPU all of its presets.
DEFAULTS: List[str] = [name for name, preset in PRESETS.items()
                       if preset.device == 'cpu' and preset.targets and name != 'denoising'
                       and preset.measure is not exported_models]
GPU_DEFAULTS: List[str] = [name for name, preset in PRESETS.items() if preset.device == 'cuda']
