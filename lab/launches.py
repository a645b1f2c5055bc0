"""Count what an eager forward pass asks of a GPU: kernel launches, and bytes of the tensors that the kernels take.

The model runs on the meta device, which needs neither a GPU nor memory. PyTorch's operators count as one launch each,
without views and allocations. The operators of `subquad.kernels` run their own launching code, with a launcher that
counts: each Triton kernel is one launch. The bytes are those of every argument and result of a launch, once each, as if
no cache kept them. PyTorch may run an operator as several kernels on a GPU, which this count does not see.
"""
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Allocations, which launch nothing. Views are known by their schemas.
_ALLOCATIONS = {'empty', 'new_empty', 'empty_like', 'empty_strided', 'new_empty_strided', '_unsafe_view', 'lift_fresh',
                'is_same_size'}


@dataclass
class Launches:
    """Launches and bytes of a forward pass, by the name of the operator or Triton kernel."""
    launches: Dict[str, int] = field(default_factory=Counter)
    bytes: Dict[str, int] = field(default_factory=Counter)

    def add(self, name: str, tensors: Iterable[Any]) -> None:
        """Add one launch that reads or writes these tensors; other values in `tensors` are left out."""
        self.launches[name] += 1
        self.bytes[name] += sum(map(_bytes, tensors))

    @property
    def total(self) -> int:
        """All launches."""
        return sum(self.launches.values())

    @property
    def gigabytes(self) -> float:
        """All bytes, in units of 1e9."""
        return sum(self.bytes.values()) / 1e9


def _bytes(x: Any) -> int:
    """Bytes of a tensor's elements; those that an expanded tensor repeats count once."""
    if not isinstance(x, Tensor):
        return 0
    elements = 1
    for size, stride in zip(x.shape, x.stride()):
        elements *= size if stride or not size else 1
    return elements * x.element_size()


def _only_views(function: Any) -> bool:
    """Whether an operator returns no tensor, or views of its arguments only."""
    returned = [result.alias_info for result in function._schema.returns if 'Tensor' in str(result.type)]
    return all(alias is not None and not alias.is_write for alias in returned)


class _Counting(TorchDispatchMode):
    """Add every operator within the block to a `Launches`."""

    def __init__(self, found: Launches):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function._schema.name
        own = torch._library.custom_ops.OPDEFS.get(name)
        if own is not None and not name.endswith(('_portable_fwd', '_portable_bwd')):
            with self:
                return own._init_fn(*args, **kwargs)
        result = function(*args, **kwargs)
        short = name.split('::')[-1]
        if short not in _ALLOCATIONS and not _only_views(function):
            outputs = {a.name for a in function._schema.arguments if a.is_out}
            read = (args, {key: value for key, value in kwargs.items() if key not in outputs})
            self.found.add(short, [*tree_leaves(read), *tree_leaves(result)])
        return result


@contextmanager
def _launcher(found: Launches) -> Iterator[None]:
    """Count Triton's launches within the block, and launch nothing."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from subquad.kernels.common import launch

    def run(self, *args, grid, warmup, **options):
        tensors = {id(x): x for x in tree_leaves((args, options))}           # one tensor may stand for two arguments
        found.add(self.fn.__name__.strip('_').removesuffix('_kernel'), tensors.values())

    with ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(mock.patch.object(kind, 'run', run))
        stack.enter_context(mock.patch.object(launch, 'target', lambda: ('cuda', '90')))
        yield


@contextmanager
def counting() -> Iterator[Launches]:
    """Count the launches of operators on meta tensors within the block; those of `subquad.kernels` run on Triton.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    from subquad.kernels import use_backend
    found = Launches()
    with use_backend('triton'), _launcher(found), _Counting(found):
        yield found


def count_launches(name: str, side: int = 224, batch: int = 128, dtype: torch.dtype = torch.bfloat16,
                   **options: Any) -> Launches:
    """Count the launches of a timm model's eager forward pass in evaluation mode, without gradients.

    Args:
        name: timm model name.
        side: height and width of the images, in pixels.
        batch: number of images.
        dtype: dtype of the parameters and of the images.
        options: options of the model.

    Raises:
        UserError: the name is unknown or the model refuses an option.
        ModuleNotFoundError: Triton is not installed.
    """
    from subquad.tools.engine.zoo import create
    model = create(name, device='meta', **options).to(dtype).eval()
    images = torch.empty(batch, model.pretrained_cfg['input_size'][0], side, side, dtype=dtype, device='meta')
    with torch.no_grad():
        for _ in range(2):                       # the first pass makes tables that later ones find
            with counting() as found:
                model(images)
    return found
