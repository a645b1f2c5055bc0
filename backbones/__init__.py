"""Vision backbones. Importing this package registers them with timm."""
if __name__ != 'subquad.backbones':
    raise ImportError(f'import subquad.backbones instead of {__name__!r}: the folder backbones/ is not a top-level '
                      'package, and its models would be registered twice')

from .lcsm import LCSM
from .lcsm_sequence import LCSMSequence
from .mambavision import MambaVision
from .mlla import MLLA
from .mobilevitv2 import MobileViTv2
from .myo import Myo
from .myo_sequence import MyoSequence
from .ppma import PPMA
from .rmt import RMT
from .vim import Vim
from .vmamba import VMamba

__all__ = ['LCSM', 'LCSMSequence', 'MLLA', 'MambaVision', 'MobileViTv2', 'Myo', 'MyoSequence', 'PPMA', 'RMT', 'VMamba',
           'Vim']
