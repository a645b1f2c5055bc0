"""Reading and writing weight files."""
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .errors import PathLike, WeightsError, shown, some
from .metadata import check_metadata
from .pickles import EXPANSION, read_pickle

METADATA_KEY = 'subquad'
# Where checkpoints keep the weights; an averaged copy first (PPMA's reported S and B figures are its). mmengine's files
# have it under state_dict, and what it is the average of under ema_state_dict.
_WRAPPERS = ('model_ema', 'state_dict_ema', 'model', 'state_dict', 'ema_state_dict', 'model_state_dict')


class Checkpoint(NamedTuple):
    """What a weight file holds.

    weights: name -> tensor on the CPU. metadata: of `save_weights`, or {}. source: for a pickle the key that the
    weights were under ('model_ema', 'state_dict', ...), or ''. meta: what mmengine's Runner keeps beside them, or {}.
    """
    weights: Dict[str, Tensor]
    metadata: Dict[str, Any]
    source: str
    meta: Dict[str, Any]


def unwrap(checkpoint: Dict[str, Any]) -> Tuple[Dict[str, Any], str]:
    """The weights in a checkpoint, and under which of its keys they were: an averaged copy first, '' for none.

    What wrapped the model in training is taken off the names: `module.` of several processes, `net.` of our Runner.

    Raises:
        WeightsError: keys that are not strings.
    """
    source = next((key for key in _WRAPPERS if isinstance(checkpoint.get(key), dict) and checkpoint[key]), '')
    weights = checkpoint[source] if source else checkpoint
    for key in weights:
        if not isinstance(key, str):
            raise WeightsError(f'names of weights must be strings, got {str(key)[:60]} ({type(key).__name__})')
    for prefix in ('module.', 'net.'):
        if weights and all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights, source


def read_checkpoint(path: PathLike) -> Tuple[Dict[str, Tensor], Dict[str, Any], str]:
    """Weights, our metadata and where in the file the weights were found.

    Args:
        path: a .safetensors file, or a pickle (.pth, .pt, .bin), which is read by torch's restricted unpickler.

    Returns:
        (name -> tensor on the CPU; metadata of `save_weights`, or {}; for a pickle the key they were under
        ('model_ema', 'state_dict', ...), or '' for a bare state dict or safetensors).

    Raises:
        WeightsError: no such file, damaged, code in a pickle, metadata of wrong types, no weights in it, or tensors
            that are no plain ones (sparse, quantised, without data, expanded beyond the file's size).
    """
    return read(path)[:3]


def read(path: PathLike) -> Checkpoint:
    """As `read_checkpoint`, with what mmengine's Runner keeps beside the weights.

    Raises:
        WeightsError: as for `read_checkpoint`.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise WeightsError(f'{shown(path)} is not a file')
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:      # ValueError: a null character
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f'no weight file at {shown(path)}') from error
    except OSError as error:
        raise WeightsError(f'{shown(path)} cannot be read: {error.strerror or error}') from error
    if path.suffix == '.safetensors':
        return Checkpoint(*_read_safetensors(path), '', {})
    checkpoint = read_pickle(path)
    try:
        weights, source = unwrap(checkpoint) if isinstance(checkpoint, dict) else ({}, '')
    except WeightsError as error:
        raise WeightsError(f'{shown(path)}: {error}') from error
    weights = {key: value.detach() for key, value in weights.items() if isinstance(value, Tensor)}
    if not weights:
        raise WeightsError(f'{shown(path)} holds no weights')
    check_plain(weights, shown(path), size)
    meta = checkpoint.get('meta')
    return Checkpoint(weights, {}, source, meta if isinstance(meta, dict) else {})


def read_metadata(path: PathLike) -> Dict[str, Any]:
    """The metadata of `save_weights` in a .safetensors file, without its weights.

    Raises:
        WeightsError: the file cannot be read, or its metadata have wrong types.
    """
    return _read_safetensors(Path(path), weights=False)[1]


def _read_safetensors(path: Path, weights: bool = True) -> Tuple[Dict[str, Tensor], Dict[str, Any]]:
    try:
        with safe_open(path, 'pt') as file:
            text = (file.metadata() or {}).get(METADATA_KEY, '{}')
            tensors = {key: file.get_tensor(key) for key in file.keys()} if weights else {}
    except OSError as error:
        raise WeightsError(f'{shown(path)} cannot be read: {error.strerror or error}') from error
    except MemoryError as error:
        raise WeightsError(f'{shown(path)} needs more memory than there is') from error
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, OverflowError) as error:
        reason = str(error)[:120] or type(error).__name__
        raise WeightsError(f'{shown(path)} is damaged or not a safetensors file ({reason})') from error
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f'{shown(path)} holds damaged metadata ({str(error)[:120]})') from error
    check_metadata(metadata, shown(path))
    if weights and not tensors:
        raise WeightsError(f'{shown(path)} holds no weights')
    return tensors, metadata


def check_plain(weights: Dict[str, Tensor], name: str, size: Optional[int] = None) -> None:
    """Refuse tensors that are no arrays of numbers in memory; `name` is the file's and `size` its bytes.

    Raises:
        WeightsError: which tensor, and what it is.
    """
    for key, tensor in weights.items():
        kind = _kind(tensor)
        if not kind and size is not None and tensor.numel() * tensor.element_size() > size + EXPANSION:
            kind = f'expands to {tensor.numel() * tensor.element_size():,} bytes from a file of {size:,}'
        if kind:
            raise WeightsError(f'{name}: {some([key])} {kind}; weights must be plain dense tensors')


def _kind(tensor: Tensor) -> str:
    """What a tensor is, where it is not a plain one with data on the CPU or a GPU."""
    if tensor.is_meta:
        return 'is a meta tensor, without data'
    if tensor.is_quantized:
        return f'is quantised ({tensor.dtype})'
    if tensor.layout != torch.strided:
        return f'is sparse ({tensor.layout})'
    if tensor.is_nested or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f'is a {type(tensor).__name__}' + (' (nested)' if tensor.is_nested else '')
    return ''


def save_weights(model: nn.Module, path: PathLike, metadata: Optional[Dict[str, Any]] = None) -> None:
    """`save_state_dict` of a model's state dict.

    Raises:
        OSError: the folder cannot be written to.
    """
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
    with written_whole(path) as temporary:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(tensors, temporary, {METADATA_KEY: json.dumps(metadata or {})})


@contextmanager
def written_whole(path: PathLike) -> Iterator[str]:
    """Write a file whole or not at all: the block writes to the temporary file that it gets, in the same folder, which
    takes the place of `path` at the end and is removed after an error.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix='.part')
    os.close(handle)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)     # mkstemp's 0600 is for secrets
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
