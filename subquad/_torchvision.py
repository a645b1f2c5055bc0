"""Repair the import of a torchvision whose operators do not load, such as a CUDA build beside a CPU torch."""
import importlib
import os
import sys
import warnings

_library = None     # the schemas live as long as this object


def repair_torchvision() -> None:
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
    # `python -m subquad ...` needs none of these operators.
    if ('-m', 'subquad') not in zip(sys.orig_argv, sys.orig_argv[1:]):
        _warn('torchvision was built for another torch: its compiled operators (nms and the like) are not '
              'available, everything else is. A torchvision of the same build as torch removes this warning.')


def _warn(message: str) -> None:
    """Warn at the line that imports this package, not at one of its own files or of the import system."""
    own_files = (os.path.dirname(os.path.abspath(__file__)), os.path.dirname(importlib.__file__), '<frozen importlib')
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own_files):
        frame = frame.f_back
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno,
                           registry=frame.f_globals.setdefault('__warningregistry__', {}))
