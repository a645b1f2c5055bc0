"""Models as `subquad benchmark` runs them: any timm name, on a backend of ours, compiled, a forward pass or a step."""
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import kernels
from ..common.cli import UserError
from ..engine import zoo
from .baselines import OURS


def parse_model(text: str) -> Tuple[str, Optional[str], bool]:
    """'NAME', 'NAME@BACKEND', 'NAME+compile' or both -> name, backend, whether compiled.

    Raises:
        UserError: unknown backend.
    """
    text, plus, option = text.partition('+')
    name, at, backend = text.partition('@')
    if plus and option != 'compile' or at and backend not in OURS:
        raise UserError(f"a model is NAME, NAME@BACKEND or either with +compile, with a backend of {', '.join(OURS)}; "
                        f'got {text + plus + option!r}')
    return name, backend or None, bool(plus)


def check_model(text: str) -> None:
    """Raises UserError for a model that there is not, before anything runs."""
    zoo.create(parse_model(text)[0], device='meta')


def model_call(text: str, images: Tensor, train: bool, weights: Optional[Dict[str, Tensor]] = None
               ) -> Tuple[Callable[[], Any], Dict[str, Tensor]]:
    """A forward pass, or a training step (cross entropy, gradients, SGD) under autocast where images are of half type.

    Args:
        text: as for `parse_model`.
        images: (B, 3, H, W).
        train: a training step.
        weights: a state dict, taken where its names and shapes are this model's.

    Returns:
        (the call, the model's state dict).

    Raises:
        UserError: unknown model or backend, or a size that the model refuses.
    """
    name, backend, compiled = parse_model(text)
    fixed = zoo.size_options(name, images.shape[2:])
    network: nn.Module = zoo.create(name, **fixed).to(images.device).train(train)
    own = network.state_dict()
    if weights and {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in own.items()}:
        network.load_state_dict(weights)
    half = images.dtype != torch.float32
    if half and not train:
        network = network.to(images.dtype)
    run = torch.compile(network, dynamic=False) if compiled else network
    labels = torch.randint(0, network.num_classes, (len(images),), device=images.device)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)

    def forward():
        with torch.no_grad(), kernels.use_backend(backend or 'auto'):
            return run(images)

    def training_step():
        with kernels.use_backend(backend or 'auto'):
            with torch.autocast(images.device.type, images.dtype, enabled=half):
                loss = F.cross_entropy(run(images.float()).float(), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return training_step if train else forward, own
