"""Observe the inputs of modules inside a model."""
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, Mapping, Tuple, TypeVar

from torch import Tensor, nn

Seen = TypeVar('Seen')


def observe_inputs(
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        images: Tensor,
        observe: Callable[[nn.Module, Tensor], Seen],
) -> Dict[str, Seen]:
    """Run a model in evaluation mode and call `observe` on the input of some of its modules.

    The method `forward_features` runs if there is one, and otherwise the whole model, such as that of
    features_only=True. The hooks are removed afterwards, and each module returns to its own mode. The caller sets the
    gradient mode.

    Args:
        model: a model of this package, or a module that contains one.
        modules: the modules to observe, by name.
        images: the input of the model.
        observe: called as observe(module, input) before the module runs.

    Returns:
        The values that `observe` returned, by the name of the module, for all modules that ran.

    Raises:
        TypeError: images and parameters, or parameters of different modules, have dtypes that the model cannot combine.
    """
    found: Dict[str, Seen] = {}

    def hook(name: str, module: nn.Module, inputs: Tuple[Tensor, ...]) -> None:
        found[name] = observe(module, inputs[0])

    with evaluation_mode(model, images), ExitStack() as handles:
        for name, module in modules.items():
            handles.callback(module.register_forward_pre_hook(partial(hook, name)).remove)
        getattr(model, 'forward_features', model)(images)
    return found


@contextmanager
def evaluation_mode(model: nn.Module, images: Tensor) -> Iterator[None]:
    """Around a forward pass of images: put a model into evaluation mode, and restore the mode of each module.

    Raises:
        TypeError: PyTorch refuses the dtypes; the message names all of them, where PyTorch names two or none.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()                                         # running statistics must not change
    try:
        yield
    except RuntimeError as error:
        dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
        if 'type' not in str(error) or dtypes == [str(images.dtype)]:
            raise
        raise TypeError(f'{type(model).__name__} cannot run images of {images.dtype} with parameters of '
                        f"{' and '.join(dtypes)}: {str(error).splitlines()[0]}") from error
    finally:
        for module, training in modes:
            module.training = training


def check_model(model: Any) -> None:
    """Raise TypeError unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f'model must be a torch.nn.Module, got {type(model).__name__}')


def check_images(x: Any) -> None:
    """Raise ValueError unless x holds images (B, C, H, W) of real numbers, with no empty dimension."""
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point() or not x.numel():
        came = f'{x.dtype} of shape {tuple(x.shape)}' if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f'x must be images (B, C, H, W) of real numbers, at least one, got {came}')
