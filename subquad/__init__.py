"""Sub-quadratic vision backbones with Triton kernels. Importing this package registers the models with timm."""
from importlib.util import find_spec
from pathlib import Path

from ._torchvision import repair_torchvision

__version__ = '0.1.0'

if find_spec('.backbones', __name__) is None:
    # A bare checkout: the mapped folders (setup.py's package_dir) lie beside this one.
    __path__.append(str(Path(__file__).resolve().parent.parent))

repair_torchvision()

from . import backbones, kernels  # noqa: E402, F401  (timm, which they import, needs a working torchvision)
from .backbones.graft import graft, ungraft  # noqa: E402, F401
from .backbones.influence import influence  # noqa: E402, F401
from .backbones.padding import exact_padding, forward_padded, pad_images  # noqa: E402, F401
from .backbones.prepare import prepare  # noqa: E402, F401
from .backbones.resolution import set_decay_scale  # noqa: E402, F401
from .backbones.saliency import class_activation, effective_receptive_field  # noqa: E402, F401
