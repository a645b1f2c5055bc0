"""Backbones for MMDetection and MMSegmentation, and heads, transforms and optimizer wrappers that both lack.

Set `custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)` in a config to use every name
below as a `type`. The names are registered in MMEngine's root registries, where both libraries look them up. This
package needs MMEngine; the heads also need MMDetection or MMSegmentation.
"""
from importlib.util import find_spec

from . import pickled_checkpoints  # noqa: F401  (registers)
from .backbones import LCSM, MLLA, PPMA, RMT, MambaVision, MobileViTv2, Myo, Vim, VMamba
from .checkpoints import load_checkpoint
from .optim import CPUAmpOptimWrapper, LayerDecayConstructor

__all__ = ['CPUAmpOptimWrapper', 'LCSM', 'LayerDecayConstructor', 'MLLA', 'MambaVision', 'MobileViTv2', 'Myo',
           'PPMA', 'RMT', 'VMamba', 'Vim', 'load_checkpoint']

if find_spec('mmdet'):
    from . import ssdlite  # noqa: F401  (registers)
if find_spec('mmseg'):
    from . import datasets, segmentation, transforms  # noqa: F401  (registers)
