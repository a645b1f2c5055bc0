"""Prepare a finished model for inference: `subquad.prepare` swaps modules for faster ones of equal outputs.

A module's own `forward` is the equation. What inference can change about a network without
changing its results (norms folded into layers, products joined, layouts, parts of a batch) stands
here, as modules that replace others.
"""
from typing import Callable, Dict, Type

from torch import nn

# Class of a module -> what replaces an instance of it. A subclass is not replaced.
REPLACEMENTS: Dict[Type[nn.Module], Callable[[nn.Module], nn.Module]] = {}


def prepare(model: nn.Module) -> nn.Module:
    """Replace modules by forms that are faster in inference, in place.

    Outputs change by rounding only. `print(model)` shows the new modules. To undo it, build the
    model again. Modules with hooks or adapters stay as they are.

    Args:
        model: a model in evaluation mode, on the device that it will run on.

    Returns:
        The model.

    Raises:
        ValueError: the model is in training mode.
    """
    if model.training:
        raise ValueError('prepare is for inference: call model.eval() first')
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in REPLACEMENTS:
                setattr(parent, name, REPLACEMENTS[type(child)](child).eval())
    return model


# ---- the four-stage skeleton and its mixers


# ---- MobileViTv2


