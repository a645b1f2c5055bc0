"""Presets of "Which model?": models of this package beside timm's, one image at a time, at three sizes."""
from typing import Dict, Tuple

from subquad.tools.bench.comparisons import compare_models

from .preset import Preset

SIZES = (224, 512, 1024)
OURS = ('ppma_tiny', 'ppma_tiny_crisscross', 'subquad_mobilevitv2_050', 'subquad_mobilevitv2_100', 'myo_tiny',
        'lcsm_tiny')
# timm's models: ImageNet-1k top-1 without further data, in percent, and the image size of the test, as timm lists them
# (results/results-imagenet.csv of huggingface/pytorch-image-models, commit 0173a139).
TIMM: Dict[str, Tuple[float, int]] = {
    'tf_efficientnetv2_b0': (78.4, 224), 'edgenext_small': (81.6, 320), 'convnextv2_nano': (82.5, 288),
    'resnet50': (80.7, 224), 'swin_tiny_patch4_window7_224': (81.4, 224), 'pvt_v2_b2_li': (82.2, 224),
    'convnext_tiny': (82.7, 288)}
PRESETS = [Preset(
    name=f'choice-{side}',
    description=f'models of this package and of timm, one {side} x {side} image',
    measure=compare_models,
    options=dict(names=(*OURS, *TIMM), size=(side, side), batch=1),
    repeats=7 if side < 1000 else 5) for side in SIZES]
