"""Make functions operators of PyTorch: nodes with a schema, shapes, operation count and gradient."""
from functools import partial, wraps
from importlib import import_module
from typing import Any, Callable, Iterable, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def node(name: str, run: Callable, flops: Callable[..., int]) -> Callable[[Callable], Any]:
    """Register the operator `subquad::NAME`.

    The decorated function is annotated with the operator's schema, and returns uninitialized tensors with the shapes,
    strides and dtypes of the results. It becomes the operator.

    Args:
        name: the operator's name, which ends with `_fwd` or `_bwd`.
        run: computes the results on the device of the first tensor; `late` where it needs Triton.
        flops: returns the number of floating-point operations, called with shapes in place of tensors.
    """
    def register(shapes: Callable) -> Any:
        @wraps(shapes)
        def on_device(*args):
            first = args[0] if isinstance(args[0], Tensor) else _first_tensor(args)
            with torch.cuda.device_of(first):
                return run(*args)

        # `torch.library.custom_op` does the same, but a call takes 20 us in place of 5 (12 with a gradient).
        qualified = f'subquad::{name}'
        torch.library.define(qualified, torch.library.infer_schema(shapes, mutates_args=()),
                             tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, 'cpu', run)
        torch.library.impl(qualified, 'default', on_device)
        torch.library.register_fake(qualified, shapes)
        packet = getattr(torch.ops.subquad, name)
        register_flop_formula(packet)(lambda *args, out_shape=None, **kwargs: flops(*args))
        operator = packet.default
        operator.on_device = on_device
        operator.register_autograd = partial(torch.library.register_autograd, qualified)
        if name.endswith('_bwd'):
            operator.register_autograd(_refuse)
        return operator
    return register


def _refuse(ctx, *grads) -> None:
    raise RuntimeError("a gradient written by hand has no gradient: use backend='export' for second derivatives")


def late(package: str, name: str) -> Callable:
    """Return a function of a module of a package, such as 'triton.forward', which is imported at its first call."""
    module, function = name.split('.')
    return lambda *args: getattr(import_module(f'{package}.{module}'), function)(*args)


def _first_tensor(args: Iterable[Any]) -> Tensor:
    """Return the first tensor of arguments that are tensors, lists of tensors, None and options."""
    for x in args:
        if isinstance(x, Tensor):
            return x
        if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor):
            return x[0]
    raise TypeError('an operator needs a tensor')


def differentiate(
        forward: Any,
        backward: Callable[..., Sequence[Tensor]],
        kept: Callable[[Any], Sequence[Tensor]] = lambda outputs: (),
        used: Sequence[int] = (0,),
) -> None:
    """Register the gradient of an operator.

    Its arguments are tensors or None, options, and flags: `save`, and after it, for each used
    output but the first, whether it is wanted.

    Args:
        forward: a `node`. With `save=False` it does not compute what only the backward pass needs.
        backward: returns the gradients of the tensors; those of None are dropped. It is called with
            the gradients of the used outputs, the tensors, the kept outputs and the options.
        kept: selects the outputs that the backward pass needs, as they are or replaced by tensors
            without elements.
        used: the outputs with a gradient. If there are several, the first has the shape of the
            first tensor, and the gradients of the others may be None.
    """
    arguments = forward._schema.arguments
    names = [argument.name for argument in arguments]
    tensors = sum('Tensor' in str(argument.type) for argument in arguments)
    end = names.index('save') if 'save' in names else len(names)

    def save(ctx, inputs, output) -> None:
        ctx.options, (ctx.saved, *ctx.wanted) = inputs[tensors:end], inputs[end:] or (True,)
        ctx.save_for_backward(*inputs[:tensors], *kept(output))
        ctx.set_materialize_grads(False)

    def gradient(ctx, *grads):
        check_saved(forward, ctx.saved)
        saved = ctx.saved_tensors
        given = [grads[n] if wanted else None for n, wanted in zip(used, (True, *ctx.wanted))]
        if all(grad is None for grad in given):
            return (None,) * len(arguments)
        if given[0] is None:
            given[0] = torch.zeros_like(saved[0])
        found = backward(*given, *saved, *ctx.options)
        return (*(None if x is None else grad for x, grad in zip(saved, found)),
                *(None,) * (len(arguments) - tensors))

    forward.register_autograd(gradient, setup_context=save)


def gradients_of(portable: Callable[..., Tensor], inputs: Sequence[Any], grad: Tensor, wanted: Sequence[bool]
                 ) -> Tuple[Optional[Tensor], ...]:
    """Return the wanted gradients of an operator by PyTorch's operations, so that they have gradients themselves.

    A backward pass needs it where `torch.is_grad_enabled()`, which `create_graph=True` asks for.
    """
    y = portable(*inputs)
    found = iter(torch.autograd.grad(y, [x for x, want in zip(inputs, wanted) if want], grad, create_graph=True))
    return tuple(next(found) if want else None for want in wanted)


def check_saved(forward: Any, saved: bool) -> None:
    """Raise a RuntimeError if an operator ran without what its gradient needs."""
    if not saved:
        raise RuntimeError(f'{forward.name()} ran with save=False: it has no gradient')
