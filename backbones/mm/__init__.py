"""The backbones in MMDetection and MMSegmentation, and what those libraries lack for them.

A config that says `custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)` can use every
name below as a `type`. They are registered once, in mmengine's root registries, where both libraries look. Needs
mmengine; the heads also need the library they are heads of.
"""
from importlib.util import find_spec

from .backbones import PPMA, MobileViTv2, Myo
from .checkpoints import load_checkpoint
from .optim import CPUAmpOptimWrapper, LayerDecayConstructor

__all__ = ['CPUAmpOptimWrapper', 'LayerDecayConstructor', 'MobileViTv2', 'Myo', 'PPMA', 'load_checkpoint']

if find_spec('mmdet'):
    from . import ssdlite  # noqa: F401  (registers)
if find_spec('mmseg'):
    from . import datasets, segmentation, transforms  # noqa: F401  (registers)
