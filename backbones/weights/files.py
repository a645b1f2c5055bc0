"""Read and write weight files."""
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from . import mlla_keys, rmt_keys, vim_keys
from .errors import PathLike, WeightsError, reading, shorten_path, some
from .metadata import check_metadata, dataset_classes
from .pickles import EXPANSION, read_pickle

METADATA_KEY = 'subquad'
# The keys under which checkpoints keep averaged weights, and others, in order of preference.
AVERAGED_KEYS = ('model_ema', 'state_dict_ema', 'ema_state_dict')
RAW_KEYS = ('model', 'models', 'state_dict', 'model_state_dict')
CHOICES = ('averaged', 'raw')


class WeightFile(NamedTuple):
    """The content of a weight file.

    Attributes:
        weights: name -> tensor on the CPU.
        metadata: the metadata of `save_weights`, or {}.
        source: for a pickle, the key that held the weights ('model_ema', 'state_dict', ...); '' for a bare state dict
            and for safetensors.
        runner_meta: what MMEngine's Runner stores beside the weights, or {}.
        choice: a sentence if the file holds both averaged and raw weights: which were read, and which not; else ''.
    """
    weights: Dict[str, Tensor]
    metadata: Dict[str, Any]
    source: str
    runner_meta: Dict[str, Any]
    choice: str = ''

    @property
    def classes(self) -> List[str]:
        """Names of the classes, from the metadata or from a Runner's checkpoint; [] if the file does not name them."""
        return self.metadata.get('classes') or dataset_classes(self.runner_meta)


def unwrap(checkpoint: Dict[str, Any], weights: Optional[str] = None,
           preferred: str = 'averaged') -> Tuple[Dict[str, Any], str]:
    """Find the weights in a checkpoint, and take the prefixes of training off their names; see `remove_prefixes`.

    Args:
        checkpoint: the content of a file.
        weights, preferred: see `read_file`.

    Returns:
        The weights, and the key of the checkpoint that held them, or '' for a bare state dict.

    Raises:
        ValueError: the choice is unknown.
        WeightsError: a name of a weight is not a string, or the checkpoint does not have the chosen weights.
    """
    check_choice(weights)
    source = _chosen_key(checkpoint, weights, preferred)
    found = checkpoint[source] if source else checkpoint
    if source == 'ema_state_dict' and _is_runners(checkpoint):
        # MMEngine's hook keeps its number of steps beside the weights, which have a prefix.
        found = {key: value for key, value in found.items() if str(key).startswith('module.')}
    for key in found:
        if not isinstance(key, str):
            raise WeightsError(f'the names of weights must be strings, got {str(key)[:60]} ({type(key).__name__})')
    return remove_prefixes(found), source


def remove_prefixes(weights: Dict[str, Any]) -> Dict[str, Any]:
    """Remove what training puts before names: `module.` if distributed, `net.` in `subquad train`, torch.compile's."""
    weights = remove_compile_prefix(weights)
    for prefix in ('module.', 'net.'):
        if weights and all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def remove_compile_prefix(weights: Dict[str, Any]) -> Dict[str, Any]:
    """Rename the weights of a module that is compiled, or has compiled parts, to the names before torch.compile."""
    if not any('_orig_mod.' in str(key) for key in weights):
        return weights
    return {str(key).replace('_orig_mod.', ''): value for key, value in weights.items()}


def check_choice(weights: Optional[str]) -> None:
    """Check the argument `weights` of `read_file`.

    Raises:
        ValueError: it is not 'averaged', 'raw' or None.
    """
    if weights not in (None, *CHOICES):
        raise ValueError(f"weights must be {' or '.join(map(repr, CHOICES))}, got {weights!r}")


def _held_keys(checkpoint: Dict[str, Any]) -> Tuple[List[str], List[str]]:
    """Return the keys under which a checkpoint holds averaged weights, and raw ones; none for a bare state dict."""
    averaged, raw = ([key for key in keys if isinstance(checkpoint.get(key), dict) and checkpoint[key]]
                     for keys in (AVERAGED_KEYS, RAW_KEYS))
    if _is_runners(checkpoint):
        swapped = dict(state_dict='ema_state_dict', ema_state_dict='state_dict')
        averaged, raw = ([swapped.get(key, key) for key in keys] for keys in (averaged, raw))
    return averaged, raw


def _is_runners(checkpoint: Dict[str, Any]) -> bool:
    """Whether MMEngine's EMAHook wrote a checkpoint.

    It keeps the average under state_dict, which its tools load, and the raw weights, with which training goes on, under
    ema_state_dict.
    """
    return all(isinstance(checkpoint.get(key), dict) and checkpoint[key] for key in ('state_dict', 'ema_state_dict'))


def _chosen_key(checkpoint: Dict[str, Any], choice: Optional[str], preferred: str) -> str:
    """Return the key of the chosen weights, or '' for a bare state dict, which has no choice."""
    averaged, raw = _held_keys(checkpoint)
    by_preference = raw + averaged if preferred == 'raw' and not _is_runners(checkpoint) else averaged + raw
    held = {None: by_preference, 'averaged': averaged, 'raw': raw}[choice]
    if not held and averaged + raw:
        other = 'averaged' if choice == 'raw' else 'raw'
        raise WeightsError(f"it has no {choice} weights, only {other} ones ({', '.join(averaged + raw)}); "
                           f'set weights={other!r}')
    return next(iter(held), '')


def _describe_choice(checkpoint: Dict[str, Any], source: str) -> str:
    """Say which weights were read if the checkpoint holds both averaged and raw ones."""
    averaged, raw = _held_keys(checkpoint)
    if not (averaged and raw):
        return ''
    if source in averaged:
        return f'its averaged weights ({source}) are read, not the raw ones ({raw[0]})'
    return f'its raw weights ({source}) are read, not the averaged ones ({averaged[0]})'


def read_checkpoint(path: PathLike, weights: Optional[str] = None) -> Tuple[Dict[str, Tensor], Dict[str, Any], str]:
    """Read the weights and the metadata of a file.

    Args:
        path: a .safetensors file, or a pickle (.pth, .pt, .bin). Pickles are read by torch's restricted unpickler.
        weights: see `read_file`.

    Returns:
        The first three fields of `WeightFile`: weights, metadata and source.

    Raises:
        WeightsError: the file does not exist, is damaged, contains code, has invalid metadata or no weights, or a
            tensor is not a dense array (it is sparse, quantized, without data or larger than the file).
    """
    return read_file(path, weights)[:3]


def read_file(path: PathLike, weights: Optional[str] = None, preferred: str = 'averaged') -> WeightFile:
    """Read a weight file, with what MMEngine's Runner stores beside the weights.

    Args:
        path: see `read_checkpoint`.
        weights: which weights to read from a file that holds several: 'averaged' for the moving average of training
            (under model_ema, state_dict_ema or ema_state_dict), 'raw' for the others (under model, models, state_dict
            or model_state_dict), None for the preferred ones if there are any. In checkpoints of MMEngine's Runner it
            is the other way round: the average is under state_dict. Safetensors and bare state dicts hold one set of
            weights, which every choice reads.
        preferred: 'averaged' or 'raw', the weights to read without a choice if the file has both. Of a checkpoint of
            MMEngine's Runner the average is read, as MMEngine does, and of RMT-T, MLLA and Vim the raw weights, whose
            figures their authors report.

    Raises:
        ValueError: the choice is unknown.
        WeightsError: see `read_checkpoint`; or the file does not have the chosen weights.
    """
    check_choice(weights)
    path = Path(path)
    with reading(path):
        if not path.is_file():
            raise WeightsError(f'{shorten_path(path)} is not a file' if path.exists() else
                               f'no weight file at {shorten_path(path)}')
    if path.suffix == '.safetensors':
        found, metadata = _read_safetensors(path)
        return WeightFile(remove_compile_prefix(found), metadata, '', {})
    return find_weights(read_pickle(path), path, weights, preferred)


def find_weights(checkpoint: Any, path: Path, weights: Optional[str] = None,
                 preferred: str = 'averaged') -> WeightFile:
    """Find the weights in the content of a pickle. See `read_file`, also for the errors."""
    raw = checkpoint.get('model') if isinstance(checkpoint, dict) else None
    if isinstance(raw, dict) and all(isinstance(key, str) for key in raw) and any(
            keys.reports_raw(raw) for keys in (rmt_keys, mlla_keys, vim_keys)):
        preferred = 'raw'
    try:
        found, source = unwrap(checkpoint, weights, preferred) if isinstance(checkpoint, dict) else ({}, '')
    except WeightsError as error:
        raise WeightsError(f'{shorten_path(path)}: {error}') from error
    found = {key: value.detach() for key, value in found.items() if isinstance(value, Tensor)}
    if not found:
        raise WeightsError(f'{shorten_path(path)} holds no weights')
    check_dense(found, shorten_path(path), path.stat().st_size)
    meta = checkpoint.get('meta')
    return WeightFile(found, {}, source, meta if isinstance(meta, dict) else {},
                      _describe_choice(checkpoint, source))


def read_metadata(path: PathLike) -> Dict[str, Any]:
    """Read the metadata of a .safetensors file that `save_weights` wrote, without its weights.

    Raises:
        WeightsError: the file cannot be read, or an entry of its metadata has a wrong type.
    """
    return _read_safetensors(Path(path), weights=False)[1]


def _read_safetensors(path: Path, weights: bool = True) -> Tuple[Dict[str, Tensor], Dict[str, Any]]:
    try:
        with reading(path), safe_open(path, 'pt') as file:
            text = (file.metadata() or {}).get(METADATA_KEY, '{}')
            tensors = {key: file.get_tensor(key) for key in file.keys()} if weights else {}
    except WeightsError:
        raise
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, OverflowError) as error:
        reason = str(error)[:120] or type(error).__name__
        raise WeightsError(f'{shorten_path(path)} is damaged or not a safetensors file ({reason})') from error
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f'{shorten_path(path)} holds damaged metadata ({str(error)[:120]})') from error
    check_metadata(metadata, shorten_path(path))
    if weights and not tensors:
        raise WeightsError(f'{shorten_path(path)} holds no weights')
    return tensors, metadata


def check_dense(weights: Dict[str, Tensor], name: str, size: Optional[int] = None) -> None:
    """Check that all tensors are dense arrays in memory.

    Args:
        weights: name -> tensor.
        name: the name of the file, for the message.
        size: the size of the file in bytes; a tensor must not be much larger.

    Raises:
        WeightsError: a tensor is something else; the message names the tensor and its kind.
    """
    for key, tensor in weights.items():
        kind = _unsupported_kind(tensor)
        if not kind and size is not None and tensor.numel() * tensor.element_size() > size + EXPANSION:
            kind = f'expands to {tensor.numel() * tensor.element_size():,} bytes from a file of {size:,}'
        if kind:
            raise WeightsError(f'{name}: {some([key])} {kind}; weights must be dense tensors')


def _unsupported_kind(tensor: Tensor) -> str:
    """Say what a tensor is if it is not a dense array with data, else return ''."""
    if tensor.is_meta:
        return 'is a meta tensor without data'
    if tensor.is_quantized:
        return f'is quantized ({tensor.dtype})'
    if tensor.layout != torch.strided:
        return f'is sparse ({tensor.layout})'
    if tensor.is_nested or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f'is a {type(tensor).__name__}' + (' (nested)' if tensor.is_nested else '')
    return ''


def save_weights(model: nn.Module, path: PathLike, metadata: Optional[Dict[str, Any]] = None) -> None:
    """Write the weights of a model as safetensors; see `save_state_dict`, also for the errors.

    Raises:
        ValueError: the model is prepared, so that its weights are not those of its name.
    """
    if getattr(model, 'prepared', False):
        raise ValueError('a prepared model has joined layers: save the weights before subquad.prepare')
    save_state_dict(model.state_dict(), path, metadata)


def save_state_dict(weights: Dict[str, Tensor], path: PathLike, metadata: Optional[Dict[str, Any]] = None) -> None:
    """Write weights as safetensors. An interrupted write leaves the old file untouched.

    Args:
        weights: name -> tensor.
        path: the file, which is replaced atomically.
        metadata: values that JSON can hold, such as the model's name and classes. `read_metadata` returns them.

    Raises:
        ValueError: the name of the file does not end in .safetensors.
        OSError: the folder is not writable.
    """
    if Path(path).suffix != '.safetensors':
        raise ValueError(f'{shorten_path(path)} must end in .safetensors, because this is the format of the file')
    with write_atomically(path) as temporary:
        # Copies, because safetensors refuses tied weights, which share memory.
        tensors = {name: tensor.detach().to('cpu', copy=True).contiguous() for name, tensor in weights.items()}
        # transformers reads only files whose metadata name the format.
        save_file(tensors, temporary, {'format': 'pt', METADATA_KEY: json.dumps(metadata or {})})
        _sort_metadata(temporary)


def _sort_metadata(path: PathLike) -> None:
    """Sort the metadata of a safetensors file, which are in random order, so that equal weights give equal files.

    The header keeps its length: 8 bytes with the length, then JSON that may end with spaces.
    """
    with open(path, 'r+b') as file:
        length = int.from_bytes(file.read(8), 'little')
        header = json.loads(file.read(length))
        header['__metadata__'] = dict(sorted(header['__metadata__'].items()))
        text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


@contextmanager
def write_atomically(path: PathLike) -> Iterator[str]:
    """Replace a file atomically.

    The block gets the path of a temporary file in the same folder and writes to it. At the end of the block the
    temporary file replaces `path`; after an error it is removed.

    Raises:
        OSError: the folder is not writable.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix='.part')
    os.close(handle)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)     # mkstemp makes files that only the owner can read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
