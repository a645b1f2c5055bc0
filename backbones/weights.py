"""Weight files: safetensors of our own, foreign pickles read without running them, loading that says what does not fit.

Nothing here ever leaves a weight random in silence: a file that does not fit the model raises, naming keys and shapes.
"""
import argparse
import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

PathLike = Union[str, Path]
METADATA_KEY = 'subquad'
# Where checkpoints keep the weights; an averaged copy first (PPMA's reported S and B figures are its). mmengine's files
# have it under state_dict, and what it is the average of under ema_state_dict.
_WRAPPERS = ('model_ema', 'state_dict_ema', 'model', 'state_dict', 'ema_state_dict', 'model_state_dict')


class WeightsError(ValueError):
    """A weight file that is missing, damaged, unsafe or not this model's; the message is one sentence."""


def _harmless_types() -> List[Any]:
    """Types without behaviour that training scripts put beside the weights."""
    types = [argparse.Namespace, np.ndarray, np.dtype, np._core.multiarray.scalar, np._core.multiarray._reconstruct,
             *{type(np.dtype(kind)) for kind in ('f4', 'f8', 'i4', 'i8', 'b1', 'u1')}]
    try:
        from mmengine.logging import HistoryBuffer
    except ImportError:
        return types
    # A HistoryBuffer refers to its own methods, which is written as calls of getattr: these, and no other, are made.
    def method(owner: Any, name: str) -> Any:
        if owner is not HistoryBuffer or name not in ('mean', 'max', 'min', 'current'):
            raise pickle.UnpicklingError(f'GLOBAL getattr of {name!r} is not allowed')
        return getattr(owner, name)
    return [*types, HistoryBuffer, (method, 'builtins.getattr'), (method, '__builtin__.getattr')]


def unwrap(checkpoint: Dict[str, Any]) -> Tuple[Dict[str, Any], str]:
    """The weights in a checkpoint, and under which of its keys they were: an averaged copy first, '' for none.

    What wrapped the model in training is taken off the names: `module.` of several processes, `net.` of our Runner.
    """
    source = next((key for key in _WRAPPERS if isinstance(checkpoint.get(key), dict) and checkpoint[key]), '')
    weights = checkpoint[source] if source else checkpoint
    for prefix in ('module.', 'net.'):
        if weights and all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights, source


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: nn.Module) -> Dict[str, Any]:
    """Weights under the model's key names, as timm asks for them.

    A whole checkpoint is unwrapped as by `unwrap`; the `backbone.` of a detector's file is taken off and the detector's
    heads with it; published key names are translated by the model's family.
    """
    weights, _ = unwrap(state_dict)
    if any(key.startswith('backbone.') for key in weights):
        weights = {key.removeprefix('backbone.'): value for key, value in weights.items()
                   if key.startswith('backbone.')}
    translate = getattr(model, 'translate_checkpoint', None)
    return translate(weights) if translate else weights


def read_checkpoint(path: PathLike) -> Tuple[Dict[str, Tensor], Dict[str, Any], str]:
    """Weights, our metadata and where in the file the weights were found.

    Args:
        path: a .safetensors file, or a pickle (.pth, .pt, .bin), which is read by torch's restricted unpickler.

    Returns:
        (name -> tensor on the CPU; metadata of `save_weights`, or {}; for a pickle the key they were under
        ('model_ema', 'state_dict', ...), or '' for a bare state dict or safetensors).

    Raises:
        WeightsError: no such file, damaged, code in a pickle, or no weights in it.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f'no weight file at {path}')
    if path.suffix == '.safetensors':
        try:
            with safe_open(path, 'pt') as file:
                metadata = json.loads((file.metadata() or {}).get(METADATA_KEY, '{}'))
                return {key: file.get_tensor(key) for key in file.keys()}, metadata, ''
        except (SafetensorError, json.JSONDecodeError) as error:
            raise WeightsError(f'{path} is damaged or no safetensors file ({error})') from error
    try:
        with torch.serialization.safe_globals(_harmless_types()):
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:   # the unpickler raises whatever the bytes lead it to
        text = str(error)
        if 'GLOBAL ' in text:          # how the restricted unpickler names what it does not allow
            name = text.split('GLOBAL ')[1].split()[0].strip('.')
            beside = [path.parent / name for name in ('best.safetensors', 'last.safetensors')]
            hint = next((f'use {file} beside it' for file in beside if file.exists()),
                        'convert it to safetensors where you trust it')
            raise WeightsError(f'{path} is a pickle that could run code ({name}): refused; {hint}') from error
        raise WeightsError(f'{path} is damaged or no checkpoint ({type(error).__name__})') from error
    weights, source = unwrap(checkpoint) if isinstance(checkpoint, dict) else ({}, '')
    weights = {k: v for k, v in weights.items() if isinstance(v, Tensor)}
    if not weights:
        raise WeightsError(f'{path} holds no weights')
    return weights, {}, source


def save_weights(model: nn.Module, path: PathLike, metadata: Optional[Dict[str, Any]] = None) -> None:
    """`save_state_dict` of a model's state dict."""
    save_state_dict(model.state_dict(), path, metadata)


def save_state_dict(weights: Dict[str, Tensor], path: PathLike, metadata: Optional[Dict[str, Any]] = None) -> None:
    """Write weights as safetensors, whole or not at all.

    Args:
        weights: by name.
        path: the file, replaced atomically.
        metadata: JSON-able facts kept in the file, such as the model's name and classes.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix='.part')
    os.close(handle)
    try:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(tensors, temporary, {METADATA_KEY: json.dumps(metadata or {})})
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)     # mkstemp's 0600 is for secrets
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_weights(model: nn.Module, path: PathLike) -> str:
    """Load a file into a model of this package, every weight of it.

    Args:
        model: made by timm; published key names are translated by its family's checkpoint filter.
        path: as for `read_checkpoint`.

    Returns:
        Where in the file the weights were found ('' for safetensors).

    Raises:
        WeightsError: the file cannot be read, or is not this model's: which keys, which shapes.
    """
    weights, _, source = read_checkpoint(path)
    load_state_dict(model, weights, str(path))
    return source


def load_state_dict(model: nn.Module, weights: Dict[str, Tensor], name: str) -> None:
    """`model.load_state_dict` after the family's filter, all or nothing; `name` is the file's, for messages.

    Only these may differ: a classifier's file lacks a dense backbone's output norms (identities then), and has a
    classifier to spare where the model has none.

    Raises:
        WeightsError: keys missing, keys to spare, or shapes that differ.
    """
    weights = checkpoint_filter_fn(weights, model)
    own = model.state_dict()
    if not any(key.startswith('output_norms.') for key in weights):
        # A classifier's file for a dense backbone: its output norms start as they were made, as the identity.
        weights = {**{k: v for k, v in own.items() if k.startswith('output_norms.')}, **weights}
    if not getattr(model, 'num_classes', 0):       # what needs no classifier needs no weights for one
        weights = {k: v for k, v in weights.items() if k in own or not k.startswith('head.')}
    problems = differences(own, weights)
    if problems:
        kind = getattr(model, 'pretrained_cfg', {}).get('architecture') or type(model).__name__
        raise WeightsError(f"{name} is not a checkpoint of this {kind}: {'; '.join(problems)}")
    model.load_state_dict(weights)


def differences(own: Dict[str, Tensor], weights: Dict[str, Tensor]) -> List[str]:
    """What keeps `weights` from being those of a model whose state dict is `own`: a phrase for each kind of trouble."""
    problems: List[str] = []
    for what, keys in (('missing', [k for k in own if k not in weights]),
                       ('not in the model', [k for k in weights if k not in own])):
        if keys:
            problems.append(f'{len(keys)} keys {what} ({some(keys)})')
    shapes = [f'{k} {tuple(weights[k].shape)} instead of {tuple(own[k].shape)}' for k in own
              if k in weights and weights[k].shape != own[k].shape]
    if shapes:
        problems.append(f'{len(shapes)} shapes differ ({some(shapes)})')
    return problems


def some(items: List[str], count: int = 3) -> str:
    """The first few of a list, for messages."""
    return ', '.join(items[:count]) + (', ...' if len(items) > count else '')
