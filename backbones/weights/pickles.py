"""Read pickles (.pth, .pt, .bin) without running code in them."""
import argparse
import errno
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, List

import numpy as np
import torch

from .errors import WeightsError, reading, shorten_path

# NumPy 2 renamed this module. Files name one or the other, depending on the version that wrote them.
_NUMPY_MODULES = ('numpy.core.multiarray', 'numpy._core.multiarray')
_STATISTICS = ('mean', 'max', 'min', 'current')
# How torch's unpickler names what it does not read.
_CODE = re.compile(r'GLOBAL (\S+)|(TorchScript)|unrecognized function (.+)|but got (<.+>)')
# A tensor or an unpacked archive may be larger than its file by at most this many bytes.
EXPANSION = 16 * 2 ** 20
_ZIP_START = b'PK\3\4'
_FOLDER = 0x10               # a bit of an entry's attributes


def read_pickle(path: Path) -> Any:
    """Read a file of `torch.save` with torch's restricted unpickler.

    Args:
        path: an existing file.

    Returns:
        The object, with its tensors on the CPU.

    Raises:
        WeightsError: the file cannot be read, is damaged, is compressed or refers to code.
    """
    try:
        with reading(path), torch.serialization.safe_globals(_harmless_types()), warnings.catch_warnings():
            check_archive(path)
            warnings.simplefilter('ignore')              # torch warns about pickle protocols, which users cannot change
            return torch.load(path, map_location='cpu', weights_only=True)
    except WeightsError:
        raise
    except Exception as error:   # damaged bytes make the unpickler raise any exception
        code = _CODE.search(str(error)) if isinstance(error, (pickle.UnpicklingError, RuntimeError)) else None
        if code:
            name = _printable(next(filter(None, code.groups())).strip('.'))
            neighbors = [path.parent / file for file in ('best.safetensors', 'last.safetensors')]
            hint = next((f'use {shorten_path(file)} from the same folder' for file in neighbors if file.exists()),
                        'if you trust the file, convert it to safetensors')
            raise WeightsError(f'{shorten_path(path)} is a pickle that could run code ({name}) and was not read; '
                               f'{hint}') from error
        raise WeightsError(f'{shorten_path(path)} is damaged, or a pickle that could run code, and was not read '
                           f'({type(error).__name__})') from error


def _harmless_types() -> List[Any]:
    """Return the types without behavior that training scripts store beside the weights."""
    scalar, reconstruct = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
    # The configs of training scripts that descend from Swin's are dicts of yacs, which need not be installed.
    types = [argparse.Namespace, np.ndarray, np.dtype, (OrderedDict, 'yacs.config.CfgNode'),
             *((function, f'{module}.{name}') for module in _NUMPY_MODULES
               for function, name in ((scalar, 'scalar'), (reconstruct, '_reconstruct'))),
             *{type(np.dtype(kind)) for kind in ('f4', 'f8', 'i4', 'i8', 'b1', 'u1')}]
    try:
        from mmengine.logging import HistoryBuffer
    except ImportError:
        return types
    # The pickle of a HistoryBuffer calls getattr for its own methods. Only these calls are allowed.
    def statistics_method(owner: Any, name: str) -> Any:
        if owner is not HistoryBuffer or name not in _STATISTICS:
            raise pickle.UnpicklingError(f'GLOBAL getattr of {name!r} is not allowed')
        return getattr(owner, name)
    return [*types, HistoryBuffer, (statistics_method, 'builtins.getattr'),
            (statistics_method, '__builtin__.getattr')]


def check_archive(path: Path) -> None:
    """Check an archive of torch.save against its own checksums, which torch does not compare.

    Archives that torch.save does not write are refused, too: their content could fill the memory, or lie outside of
    their folder. Nothing is extracted to files, here and in torch. A file in the format before PyTorch 1.6 is no
    archive and has no checksums.

    Raises:
        WeightsError: the archive is damaged, or torch.save did not write it.
        OSError: the file cannot be read.
    """
    with open(path, 'rb') as file:
        if file.read(len(_ZIP_START)) != _ZIP_START:     # torch, too, decides by these bytes
            return
    try:
        _check_entries(path)
    except (WeightsError, MemoryError):
        raise
    except Exception as error:   # damaged bytes make zipfile raise any exception
        if isinstance(error, OSError) and error.errno != errno.EINVAL:     # EINVAL: an entry before the file's start
            raise
        raise WeightsError(f'{shorten_path(path)} is damaged or truncated ({type(error).__name__})') from error


def _check_entries(path: Path) -> None:
    """Check the entries of an archive; see `check_archive`. Damaged bytes can make zipfile raise any error."""
    name, size = shorten_path(path), path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        outside = [entry.filename for entry in entries if _leads_outside(entry.filename)]
        if outside:
            raise WeightsError(f'{name} is an archive with an entry outside of its folder ({_printable(outside[0])}), '
                               'which torch.save does not write')
        if unpacked > size + EXPANSION:
            raise WeightsError(f'{name} is a compressed archive ({unpacked:,} bytes in {size:,}), which torch.save '
                               'does not write')
        if any(entry.external_attr & _FOLDER for entry in entries):        # torch would take random memory for it
            raise WeightsError(f'{name} is damaged (an entry is marked as a folder)')
        # torch.serialization.set_crc32_options(False) writes 0 in place of every checksum.
        changed = archive.testzip() if any(entry.CRC for entry in entries) else None
    if changed:
        raise WeightsError(f'{name} is damaged ({_printable(changed)} differs from its checksum)')


def _leads_outside(name: str) -> bool:
    parts = name.replace('\\', '/').split('/')
    return name[:1] in ('/', '\\') or '..' in parts or parts[0].endswith(':')


def _printable(name: str) -> str:
    return ascii(name[:80])[1:-1]

