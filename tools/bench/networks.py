"""Models as `subquad benchmark` runs them: any timm model, a backend, compiled or not, a forward pass or a step."""
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import kernels
from ..common.cli import UserError
from ..engine import zoo
from .operators import OWN_BACKENDS


def parse_model(text: str) -> Tuple[str, Optional[str], bool]:
    """Split 'NAME', 'NAME@BACKEND', 'NAME+compile' or 'NAME@BACKEND+compile'.

    Returns:
        (name, backend or None, whether it is compiled).

    Raises:
        UserError: The text has another form, or the backend is unknown.
    """
    text, plus, option = text.partition('+')
    name, at, backend = text.partition('@')
    if plus and option != 'compile' or at and backend not in OWN_BACKENDS:
        raise UserError('a model is NAME, NAME@BACKEND, NAME+compile or NAME@BACKEND+compile, where BACKEND is one of '
                        f"{', '.join(OWN_BACKENDS)}; got {text + plus + option!r}")
    return name, backend or None, bool(plus)


def check_model(text: str) -> None:
    """Raise UserError for an unknown model, before anything runs."""
    zoo.create(parse_model(text)[0], device='meta')


def model_call(text: str, images: Tensor, train: bool, weights: Optional[Dict[str, Tensor]] = None
               ) -> Tuple[Callable[[], Any], Dict[str, Tensor]]:
    """Create a model and a function that runs it.

    Args:
        text: The model, as `parse_model` reads it.
        images: (B, 3, H, W).
        train: The function runs a training step (cross entropy, gradients, SGD; under autocast for images of a half
            type), not a forward pass.
        weights: A state dict to load if its names and shapes are those of the model.

    Returns:
        (the function, the model's state dict).

    Raises:
        UserError: The model or backend is unknown, or the model refuses the size.
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
