"""The presets of `python -m lab.benchmark`: what each one measures, and its targets."""
from typing import List

from subquad.tools.bench.comparisons import compare_models, compare_operator

from . import denoising
from .attention_units import attention_units
from .choice import PRESETS as CHOICE
from .detector import detector
from .exported_models import exported_models
from .lcsm_presets import GPU as LCSM_GPU
from .lcsm_presets import LCSM
from .plots import plot
from .polyline_growth import scan_against_mask, scan_growth
from .preset import Preset
from .tree_growth import tree_growth

_GRID_SIDES = (16, 32, 48, 64, 96, 128, 192, 256)
_TIMM_MODELS = ('swin_tiny_patch4_window7_224', 'convnext_tiny', 'mobilevit_s', 'mobilevitv2_100',
                'vit_small_patch16_224', 'deit_tiny_patch16_224')
_TIMM_MODELS_OF_ANY_SIZE = ('swin_tiny_patch4_window7_224', 'convnext_tiny', 'mobilevitv2_100')

_PPMA = [
    Preset(
        name='polyline_attention-50x80',
        description='polyline attention and the dense formula, 50 x 80 tokens, 8 heads of 32 channels',
        measure=compare_operator,
        options=dict(op='polyline_attention', grid=(50, 80), names=('portable', 'dense')),
        targets=dict(min_speedup={'dense': 2.5}, max_memory_mb=300),
        repeats=7, family='ppma'),
    Preset(
        name='polyline_attention-14x14',
        description='polyline attention and the dense formula, 14 x 14 tokens, batch 8',
        measure=compare_operator,
        options=dict(op='polyline_attention', grid=(14, 14), batch=8, names=('portable', 'dense')),
        targets=dict(min_speedup={'dense': 1}),
        repeats=30, family='ppma'),
    Preset(
        name='polyline_scan-growth',
        description='growth of the time of the polyline scan, 32 x 32 to 256 x 256 tokens',
        measure=scan_growth,
        options=dict(sides=(32, 64, 128, 256)),
        targets=dict(max_exponent=1.1),
        repeats=15, family='ppma'),
    Preset(
        name='ppma_tiny-800x1280',
        description='PPMA-Tiny and its floor, one 800 x 1280 image',
        measure=compare_models,
        options=dict(names=('ppma_tiny',), size=(800, 1280), batch=1),
        targets=dict(max_over_floor=5, max_memory_mb=600),
        repeats=7, family='ppma'),
    Preset(
        name='ppma_tiny-224',
        description='PPMA-Tiny and its floor, eight 224 x 224 images',
        measure=compare_models,
        options=dict(names=('ppma_tiny',), size=(224, 224), batch=8),
        targets=dict(max_over_floor=2.4),
        repeats=15, family='ppma'),
    Preset(
        name='figure10',
        description="L x by the N x N mask and by Algorithm 1 (PPMA's Figure 10), with a plot",
        measure=scan_against_mask,
        options=dict(sides=_GRID_SIDES, dense_until=64),
        repeats=7, family='ppma', draw=plot),
    Preset(
        name='models-224',
        description='PPMA-Tiny and timm models of its size and smaller, eight 224 x 224 images',
        measure=compare_models,
        options=dict(names=('ppma_tiny', *_TIMM_MODELS), size=(224, 224), batch=8),
        repeats=7, family='ppma'),
    Preset(
        name='models-800x1280',
        description='PPMA-Tiny and timm models that take any size, one 800 x 1280 image',
        measure=compare_models,
        options=dict(names=('ppma_tiny', *_TIMM_MODELS_OF_ANY_SIZE), size=(800, 1280), batch=1),
        repeats=3, family='ppma'),
    Preset(
        name='models-224-train',
        description='a training step of the models of models-224, eight 224 x 224 images',
        measure=compare_models,
        options=dict(names=('ppma_tiny', *_TIMM_MODELS), size=(224, 224), batch=8, train=True),
        repeats=5, family='ppma'),
    Preset(
        name='mask-rcnn_ppma-t-800x1280',
        description='inference of Mask R-CNN with PPMA-Tiny, one 800 x 1280 image: memory and share of the backbone',
        measure=detector,
        options=dict(config='mask-rcnn_ppma-t_fpn_1x_coco', size=(800, 1280)),
        repeats=3, family='ppma'),
]


def _autocast(title: str, name: str, family: str, *others: str, least: float = 2) -> Preset:
    """Return a preset of a model under autocast to bfloat16 beside float32 and beside other models under autocast.

    least: target of the speed-up over float32."""
    return Preset(
        name=f'{name.removeprefix("subquad_")}-autocast',
        description=f'{title} under autocast to bfloat16 and in float32, eight 224 x 224 images',
        measure=compare_models,
        options=dict(names=(f'{name}+autocast', name, *(f'{other}+autocast' for other in others)), size=(224, 224),
                     batch=8),
        targets=dict(min_speedup={name: least, **{f'{other}+autocast': 1 for other in others}}),
        repeats=15, processes=3, family=family)


_AUTOCAST = [
    _autocast('PPMA-Tiny', 'ppma_tiny', 'ppma', 'swin_tiny_patch4_window7_224'),
    _autocast('Myo-Tiny', 'myo_tiny', 'myo'),
    _autocast('LCSM-Tiny', 'lcsm_tiny', 'lcsm', least=1),
    _autocast('MobileViTv2-1.0', 'subquad_mobilevitv2_100', 'mobilevitv2'),
]


def _compiled(title: str, name: str, family: str, batch: int) -> Preset:
    """Return a preset of a compiled model beside the eager one."""
    return Preset(
        name=f'{name.removeprefix("subquad_")}-compiled-batch{batch}',
        description=f'{title} compiled and eager, {batch} image(s) of 224 x 224',
        measure=compare_models,
        options=dict(names=(f'{name}+compile', name), size=(224, 224), batch=batch),
        targets=dict(min_speedup={name: 0.97}),
        repeats=40 if batch == 1 else 15, family=family)


_COMPILED = [
    _compiled(title, name, family, batch) for title, name, family in (
        ('PPMA-Tiny', 'ppma_tiny', 'ppma'), ('Myo-Tiny', 'myo_tiny', 'myo'), ('LCSM-Tiny', 'lcsm_tiny', 'lcsm'),
        ('MobileViTv2-1.0', 'subquad_mobilevitv2_100', 'mobilevitv2')) for batch in (1, 8)
]

_SEPARABLE = dict(op='separable_attention', batch=8, heads=1, dim=128, names=('portable', 'eager', 'matmul'))
_MOBILEVITV2 = [
    Preset(
        name='separable_attention-32x32',
        description="separable attention of MobileViTv2-1.0's first block, 32 x 32 tokens of 128 channels, batch 8",
        measure=compare_operator,
        options=dict(_SEPARABLE, grid=(32, 32)),
        targets=dict(min_speedup={'eager': 1, 'matmul': 1}),
        processes=5, family='mobilevitv2'),
    Preset(
        name='separable_attention-sequence',
        description='separable attention on sequences of 1,024 tokens of 128 channels, batch 8',
        measure=compare_operator,
        options=dict(_SEPARABLE, grid=(1, 1024)),
        targets=dict(min_speedup={'eager': 1, 'matmul': 1}),
        processes=5, family='mobilevitv2'),
    *(Preset(
        name=f'mobilevitv2_{width}-batch{batch}',
        description=f"MobileViTv2-{int(width) / 100:g} and timm's implementation with the same weights, "
                    f'{batch} image(s) of 256 x 256',
        measure=compare_models,
        options=dict(names=(f'subquad_mobilevitv2_{width}', f'mobilevitv2_{width}'), size=(256, 256), batch=batch),
        targets=dict(min_speedup={f'mobilevitv2_{width}': 0.97}),
        repeats=40 if batch == 1 else 8, processes=5, family='mobilevitv2')
      for width in ('050', '100', '200') for batch in (1, 8)),
    *(Preset(
        name=f'{runtime}-mobilevitv2_{width}',
        description=f"exported MobileViTv2-{int(width) / 100:g} and timm's implementation with the same weights on "
                    f'{title}, one 256 x 256 image, one thread',
        measure=exported_models,
        options=dict(name=f'subquad_mobilevitv2_{width}', baseline=f'mobilevitv2_{width}', runtime=runtime),
        targets=dict(max_ratio=1.03, aim=0.9),
        repeats=40, processes=5, family='mobilevitv2')
      for runtime, title in (('onnx', 'ONNX Runtime'), ('executorch', 'ExecuTorch'))
      for width in ('050', '100', '200')),
    *(Preset(
        name=f'{mobilevit}-256',
        description=f"MobileViTv2 and a MobileViT (v1) of about its size, timm's {mobilevit}, one 256 x 256 image",
        measure=compare_models,
        options=dict(names=(f'subquad_mobilevitv2_{width}', mobilevit), size=(256, 256), batch=1),
        repeats=40, family='mobilevitv2')
      for width, mobilevit in (('050', 'mobilevit_xxs'), ('075', 'mobilevit_xs'), ('100', 'mobilevit_s'))),
    Preset(
        name='figure1',
        description="the attention units of MobileViTv2's Figure 1 over the number of tokens, with a plot",
        measure=attention_units,
        options=dict(tokens=(64, 128, 256, 512, 1024, 2048, 4096)),
        repeats=30, family='mobilevitv2', draw=plot),
]

_MYO = [
    Preset(
        name='quadtree_solve-growth',
        description='quad-tree solves of 50,176 tokens of 64 channels, from 64 grids of 28 x 28 to one of 224 x 224',
        measure=tree_growth,
        options=dict(sides=(28, 56, 112, 224), tokens=224 * 224),
        targets=dict(max_growth=1.3, max_gradient_memory=0.5),
        repeats=15, processes=3, family='myo'),
    Preset(
        name='myo_tiny-224',
        description='Myo-Tiny and PPMA-Tiny, eight 224 x 224 images',
        measure=compare_models,
        options=dict(names=('myo_tiny', 'ppma_tiny'), size=(224, 224), batch=8),
        repeats=7, family='myo'),
    Preset(
        name='denoising',
        description='denoising by one linear tree solve over the pixels in Morton, snake, raster and random order',
        measure=denoising.denoising,
        targets=dict(max_error_ratio=0.95),
        repeats=2, family='myo', draw=denoising.draw),
]

_ON_GPU = dict(dtype='bfloat16', device='cuda')
_GPU_SEPARABLE = dict(_ON_GPU, op='separable_attention', grid=(32, 32), batch=128, heads=1, dim=128,
                      names=('triton', 'compiled', 'eager'))
_GPU_QUADTREE = dict(_ON_GPU, op='quadtree_solve', grid=(56, 56), batch=64, heads=4, dim=16,
                     names=('triton', 'portable', 'loop'))
_GPU_PPMA = dict(_ON_GPU, names=('ppma_tiny@triton+compile', 'ppma_tiny@portable+compile', 'ppma_tiny@triton'),
                 size=(224, 224), batch=128)
_GPU_MODELS = dict(_ON_GPU, size=(224, 224), batch=128, names=(
    'ppma_tiny+compile', *(f'{name}+compile' for name in
                           ('swin_tiny_patch4_window7_224', 'convnext_tiny', 'vit_small_patch16_224')), 'ppma_tiny'))
_AHEAD_OF = {'swin_tiny_patch4_window7_224+compile': 1, 'convnext_tiny+compile': 1}
_GPU = [
    Preset(
        name='gpu-separable_attention-32x32',
        description="separable attention of MobileViTv2-1.0's first block, batch 128, bfloat16",
        measure=compare_operator,
        options=_GPU_SEPARABLE,
        targets=dict(min_bandwidth_share=0.75),
        family='mobilevitv2', device='cuda'),
    Preset(
        name='gpu-separable_attention-32x32-train',
        description="separable attention of MobileViTv2-1.0's first block with gradients, batch 128, bfloat16",
        measure=compare_operator,
        options=dict(_GPU_SEPARABLE, backward=True),
        family='mobilevitv2', device='cuda'),
    Preset(
        name='gpu-mobilevitv2_100-256',
        description="MobileViTv2-1.0 and timm's implementation, 128 images of 256 x 256, bfloat16",
        measure=compare_models,
        options=dict(_ON_GPU, names=('subquad_mobilevitv2_100', 'mobilevitv2_100', 'subquad_mobilevitv2_100+compile',
                                     'mobilevitv2_100+compile'), size=(256, 256), batch=128),
        targets=dict(min_speedup={'mobilevitv2_100': 1.3}),
        repeats=20, family='mobilevitv2', device='cuda'),
    Preset(
        name='gpu-polyline_attention-50x80',
        description="the fused kernel and PyTorch's attention, 50 x 80 tokens, 8 heads of 32 channels, bfloat16",
        measure=compare_operator,
        options=dict(_ON_GPU, op='polyline_attention', grid=(50, 80),
                     names=('triton', 'sdpa', 'flex', 'compiled', 'dense')),
        targets=dict(min_speedup={'sdpa': 8, 'flex': 1.5}, min_memory_saving={'sdpa': 20}),
        family='ppma', device='cuda'),
    Preset(
        name='gpu-polyline_attention-50x80-train',
        description="the fused kernel and PyTorch's attention with gradients, 50 x 80 tokens, 8 heads of 32 channels, "
                    'bfloat16',
        measure=compare_operator,
        options=dict(_ON_GPU, op='polyline_attention', grid=(50, 80), backward=True,
                     names=('triton', 'sdpa', 'flex', 'compiled')),
        family='ppma', device='cuda'),
    Preset(
        name='gpu-crisscross_attention-56x56',
        description="criss-cross attention of PPMA-Tiny's first stage with gradients, batch 64, bfloat16",
        measure=compare_operator,
        options=dict(_ON_GPU, op='crisscross_attention', grid=(56, 56), batch=64, heads=4, dim=16, backward=True,
                     names=('triton', 'compiled', 'dense')),
        family='ppma', device='cuda'),
    Preset(
        name='gpu-polyline_scan-56x56',
        description='the fused scan and the copy bandwidth, 56 x 56 tokens of 64 channels, batch 64',
        measure=compare_operator,
        options=dict(op='polyline_scan', grid=(56, 56), batch=64, heads=1, dim=64, device='cuda',
                     names=('triton', 'portable', 'dense')),
        targets=dict(min_bandwidth_share=0.6),
        family='ppma', device='cuda'),
    Preset(
        name='gpu-figure10',
        description="PPMA's Figure 10 on a GPU, with a plot",
        measure=scan_against_mask,
        options=dict(sides=_GRID_SIDES, device='cuda', dense_until=128),
        repeats=30, family='ppma', device='cuda', draw=plot),
    Preset(
        name='gpu-quadtree_solve-56x56',
        description='the quad-tree solve of 56 x 56 tokens of 64 channels, batch 64, bfloat16',
        measure=compare_operator,
        options=_GPU_QUADTREE,
        targets=dict(min_bandwidth_share=0.5),
        family='myo', device='cuda'),
    Preset(
        name='gpu-quadtree_solve-56x56-train',
        description='the quad-tree solve of 56 x 56 tokens of 64 channels with gradients, batch 64, bfloat16',
        measure=compare_operator,
        options=dict(_GPU_QUADTREE, backward=True),
        family='myo', device='cuda'),
    Preset(
        name='gpu-ppma_tiny-224',
        description='PPMA-Tiny with kernels and with the compiled portable backend, 128 images of 224 x 224, bfloat16',
        measure=compare_models,
        options=_GPU_PPMA,
        targets=dict(min_speedup={'ppma_tiny@portable+compile': 2}),
        repeats=20, family='ppma', device='cuda'),
    Preset(
        name='gpu-ppma_tiny-224-train',
        description='a training step of PPMA-Tiny with kernels and with the compiled portable backend, 128 images '
                    'of 224 x 224, bfloat16',
        measure=compare_models,
        options=dict(_GPU_PPMA, train=True),
        targets=dict(min_speedup={'ppma_tiny@portable+compile': 2}),
        repeats=20, family='ppma', device='cuda'),
    Preset(
        name='gpu-models-224',
        description='PPMA-Tiny and timm models of its size, compiled, 128 images of 224 x 224, bfloat16',
        measure=compare_models,
        options=_GPU_MODELS,
        targets=dict(min_speedup=_AHEAD_OF),
        repeats=20, family='ppma', device='cuda'),
    Preset(
        name='gpu-models-224-train',
        description='a training step of the models of gpu-models-224',
        measure=compare_models,
        options=dict(_GPU_MODELS, train=True),
        targets=dict(min_speedup=_AHEAD_OF),
        repeats=20, family='ppma', device='cuda'),
    Preset(
        name='gpu-models-800x1280',
        description='PPMA-Tiny and timm models that take any size, eight 800 x 1280 images, bfloat16',
        measure=compare_models,
        options=dict(_ON_GPU, names=('ppma_tiny', *_TIMM_MODELS_OF_ANY_SIZE), size=(800, 1280), batch=8),
        repeats=20, family='ppma', device='cuda'),
]

PRESETS = {preset.name: preset for preset in (
    *_PPMA, *_MOBILEVITV2, *_MYO, *LCSM, *CHOICE, *_AUTOCAST, *_COMPILED, *_GPU, *LCSM_GPU)}
# What `lab.benchmark` measures by default: on a CPU the presets with a target for time or memory (the target of
# `denoising` is an error; exported models need further packages), on a GPU all of its presets.
DEFAULTS: List[str] = [name for name, preset in PRESETS.items()
                       if preset.device == 'cpu' and preset.targets and name != 'denoising'
                       and preset.measure is not exported_models]
GPU_DEFAULTS: List[str] = [name for name, preset in PRESETS.items() if preset.device == 'cuda']
