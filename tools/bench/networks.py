"""Models as `subquad benchmark` runs them: any timm model, a backend, compiled or not, a forward pass or a step."""
from functools import partial
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import kernels
from ...backbones.prepare import prepare
from ...backbones.timm_interface import TimmInterface
from ..common.cli import UserError
from ..engine import zoo
from .operators import OWN_BACKENDS

OPTIONS = ('compile', 'autocast')


class Subject(NamedTuple):
    """A model as a benchmark names it. backend: None for 'auto'. autocast: to bfloat16, from float32."""
    name: str
    backend: Optional[str] = None
    compile: bool = False
    autocast: bool = False


def parse_model(text: str) -> Subject:
    """Read 'NAME' with an optional '@BACKEND' and then '+compile' or '+autocast' or both."""
    model, *options = text.split('+')
    name, at, backend = model.partition('@')
    if not set(options) <= set(OPTIONS) or len(set(options)) < len(options) or at and backend not in OWN_BACKENDS:
        raise UserError('a model is NAME, NAME@BACKEND, or one of them with +compile, +autocast or both, where BACKEND '
                        f"is one of {', '.join(OWN_BACKENDS)}; got {text!r}")
    return Subject(name, backend or None, **{option: option in options for option in OPTIONS})


def check_model(text: str, dtype: str) -> None:
    """Raise UserError for an unknown model, or autocast of images that are not float32, before anything runs."""
    subject = parse_model(text)
    if subject.autocast and dtype != 'float32':
        raise UserError(f'{text}: +autocast starts from float32 images, and these are {dtype}')
    zoo.create(subject.name, device='meta')


def model_call(text: str, images: Tensor, train: bool, weights: Optional[Dict[str, Tensor]] = None
               ) -> Tuple[Callable[[], Any], Dict[str, Tensor]]:
    """Create a model, as `parse_model` reads it, and a function that runs it on images (B, 3, H, W).

    In training the function runs a training step (cross entropy, gradients, SGD; under autocast for images of a half
    type), else a forward pass. The state dict `weights` is loaded if its names and shapes are those of the model.

    Returns:
        (the function, the model's state dict). The model is the function's attribute `network`.
    """
    subject = parse_model(text)
    fixed = zoo.size_options(subject.name, images.shape[2:])
    network: nn.Module = zoo.create(subject.name, **fixed).to(images.device).train(train)
    own = network.state_dict()
    if weights and {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in own.items()}:
        network.load_state_dict(weights)
    half = subject.autocast or images.dtype != torch.float32
    if half and not train and not subject.autocast:
        network = network.to(images.dtype)
    if not train and isinstance(network, TimmInterface):            # models of timm run as their users run them
        network = prepare(network)
    run = torch.compile(network, dynamic=False) if subject.compile else network
    context = partial(torch.autocast, images.device.type, torch.bfloat16 if subject.autocast else images.dtype)
    labels = torch.randint(0, network.num_classes, (len(images),), device=images.device)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)

    def forward():
        with torch.no_grad(), kernels.use_backend(subject.backend or 'auto'), context(enabled=subject.autocast):
            return run(images)

    def training_step():
        with kernels.use_backend(subject.backend or 'auto'):
            with context(enabled=half):
                loss = F.cross_entropy(run(images.float()).float(), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    call = training_step if train else forward
    call.network = network
    return call, own
