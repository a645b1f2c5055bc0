"""Survive a torchvision whose compiled operators do not load, such as a CUDA build beside a CPU torch."""
import importlib
import sys
import warnings

_library = None     # the schemas live as long as this object


def mend_torchvision() -> None:
    """Make `import torchvision`, and with it `import timm`, work where only its compiled operators are missing.

    The import is tried first: defining the schemas beside operators that do load would abort the process. With a
    matching pair, or without torchvision, nothing happens.
    """
    global _library
    try:
        importlib.import_module('torchvision')
        return
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if 'torchvision::nms' not in str(error):
            raise
    import torch
    _library = torch.library.Library('torchvision', 'DEF')
    for name in ('nms', 'qnms'):
        _library.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
    for module in [m for m in sys.modules if m == 'torchvision' or m.startswith('torchvision.')]:
        del sys.modules[module]
    importlib.import_module('torchvision')
    warnings.warn('torchvision was built for another torch: its compiled operators (nms and the like) are not '
                  'available, everything else is. A torchvision of the same build as torch removes this warning.',
                  stacklevel=3)
