"""The presets of `python -m lab.benchmark` for LCSM: its recurrences over the lines of grids, and its models."""
from typing import List

from subquad.tools.bench.comparisons import compare_models, compare_operator

from .line_growth import line_growth
from .line_memory import line_memory
from .preset import Preset

_SIDES = (56, 28)
LCSM: List[Preset] = [
    Preset(
        name='eos-growth',
        description='growth of the time of the recurrences with the length of the line, 1,024 to 16,384 tokens',
        measure=line_growth,
        options=dict(lengths=(1024, 4096, 16384)),
        targets=dict(max_exponent=1.2),
        repeats=5, family='lcsm'),
    Preset(
        name='eos-memory',
        description='memory of recurrences of full rank and of constant complex ones with gradients, 4,096 tokens of '
                    '64 channels, 32 keys',
        measure=line_memory,
        options=dict(length=4096, keys=32, dim=64),
        targets=dict(max_share=1 / 8),
        repeats=1, family='lcsm'),
    Preset(
        name='lcsm_tiny-224',
        description='LCSM-Tiny, PPMA-Tiny and Myo-Tiny, eight 224 x 224 images',
        measure=compare_models,
        options=dict(names=('lcsm_tiny', 'ppma_tiny', 'myo_tiny'), size=(224, 224), batch=8),
        repeats=7, family='lcsm'),
]

_ON_GPU = dict(dtype='bfloat16', device='cuda')
_MODEL = dict(_ON_GPU, names=('lcsm_tiny@triton+compile', 'lcsm_tiny@portable+compile', 'lcsm_tiny@triton'),
              size=(224, 224), batch=128)


def _operator(op: str, side: int, backward: bool) -> Preset:
    """Return a preset of the scan over rows in both directions, beside two flipped causal calls of fla-core."""
    return Preset(
        name=f"gpu-{op}-{side}x{side}{'-train' if backward else ''}",
        description=f"{op} over the rows of {side} x {side} tokens in both directions{' with gradients' * backward}, "
                    'batch 64, bfloat16, and two calls of fla-core',
        measure=compare_operator,
        options=dict(_ON_GPU, op=op, grid=(side, side), batch=64, heads=2, dim=32, backward=backward,
                     names=('triton', 'fla', 'portable')),
        targets=dict(min_speedup={'fla': 2 if op == 'eos_elementwise' else 1}),
        family='lcsm', device='cuda')


GPU: List[Preset] = [
    *(_operator(op, side, backward) for op in ('eos_elementwise', 'eos_matmul') for side in _SIDES
      for backward in (False, True)),
    Preset(
        name='gpu-lcsm_tiny-224',
        description='LCSM-Tiny with kernels and with the compiled portable backend, 128 images of 224 x 224, bfloat16',
        measure=compare_models,
        options=_MODEL,
        targets=dict(min_speedup={'lcsm_tiny@portable+compile': 1}),
        repeats=20, family='lcsm', device='cuda'),
    Preset(
        name='gpu-lcsm_tiny-224-train',
        description='a training step of LCSM-Tiny with kernels and with the compiled portable backend, 128 images of '
                    '224 x 224, bfloat16',
        measure=compare_models,
        options=dict(_MODEL, train=True),
        targets=dict(min_speedup={'lcsm_tiny@portable+compile': 1}),
        repeats=20, family='lcsm', device='cuda'),
]
