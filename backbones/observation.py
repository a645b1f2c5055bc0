"""Observe the inputs of modules inside a model."""
from functools import partial
from typing import Callable, Dict, Mapping, Tuple, TypeVar

from torch import Tensor, nn

Seen = TypeVar('Seen')


def observe_inputs(
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        images: Tensor,
        observe: Callable[[nn.Module, Tensor], Seen],
) -> Dict[str, Seen]:
    """Run `model.forward_features` in evaluation mode and call `observe` on the input of some of its modules.

    The hooks are removed afterwards, and each module returns to its own mode. The caller sets the gradient mode.

    Args:
        model: a model of this package.
        modules: the modules to observe, by name.
        images: the input of the model.
        observe: called as observe(module, input) before the module runs.

    Returns:
        The values that `observe` returned, by the module's name.
    """
    found: Dict[str, Seen] = {}

    def hook(name: str, module: nn.Module, inputs: Tuple[Tensor, ...]) -> None:
        found[name] = observe(module, inputs[0])

    handles = [module.register_forward_pre_hook(partial(hook, name)) for name, module in modules.items()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()                                     # running statistics must not change
        model.forward_features(images)
    finally:
        for module, training in modes:
            module.training = training
        for handle in handles:
            handle.remove()
    return found
