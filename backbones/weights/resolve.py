"""Find a weight file by its path, by the name of published weights, or by an address."""
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Mapping, Optional
from urllib.parse import urlsplit

from huggingface_hub import constants

from .cache import cache_folder, exclusive
from .download import LARGEST, fetch
from .errors import PathLike, WeightsError, shorten_path
from .files import read_checkpoint
from .registry import SCHEME, PublishedWeights, find
from .resumable import TransferError, discard, transfer

ADDRESS = ('http://', 'https://')
# 'arch' or 'arch.tag'. A name that ends like a weight file is a path.
_NAME = re.compile(r'\w{1,100}(\.\w{1,100})?')
_FILE_SUFFIXES = ('.bin', '.ckpt', '.onnx', '.pickle', '.pkl', '.pt', '.pth', '.safetensors', '.tar', '.zip')


def published(name: PathLike) -> Optional[PublishedWeights]:
    """Return the published weights of a name, or None for the path of a file. Nothing is downloaded.

    Args:
        name: see `resolve`.

    Raises:
        WeightsError: the name is neither that of published weights nor of a file; the message lists the nearest names.
    """
    text = str(name)
    if text.startswith(SCHEME):
        return find(text)
    if not _NAME.fullmatch(text) or text.endswith(_FILE_SUFFIXES) or Path(text).is_file():
        return None
    try:
        return find(text)
    except WeightsError as error:
        if Path(text).exists():
            return None                          # a folder or a device, which the reader refuses
        raise WeightsError(f'no weight file at {text}, and {error}') from error


def resolve(name: PathLike, cache_dir: Optional[PathLike] = None) -> Path:
    """Return the path of a weight file; published weights are downloaded unless they are in the cache.

    Args:
        name: the path of an existing file; or 'arch.tag', the name of published weights, or 'arch' for the default
            classifier of an architecture, both also with 'subquad://' before. An existing file comes before published
            weights of the same name.
        cache_dir: see `subquad.backbones.weights.download.fetch`.

    Raises:
        WeightsError: there is neither such a file nor such weights, or the download fails.
    """
    weights = published(name)
    if weights is not None:
        return fetch(weights, cache_dir)
    text = str(name)
    if not text:
        raise WeightsError('the name of the weights is empty: give a file or a name that `subquad weights list` shows')
    if '://' in text:
        raise WeightsError(f'{shorten_path(text)} is an address: download the file first, or give '
                           f'{SCHEME}NAME with a name that `subquad weights list` shows')
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:                # there is no such user
        raise WeightsError(f'{shorten_path(text)}: {error}') from error
    with suppress(OSError):                      # the reader says why
        if not path.exists():
            raise WeightsError(f'no weight file at {shorten_path(text)}')
    return path


def fetch_address(url: str, cache_dir: Optional[PathLike] = None) -> Path:
    """Return the file of an http address of the caller's, which is downloaded if it is not in the cache.

    No hash is known beforehand, and none is recorded. torch.hub, which timm uses, would keep an incomplete file.

    Raises:
        WeightsError: the file cannot be had, or is no weight file.
    """
    key = hashlib.sha256(url.encode()).hexdigest()[:16]
    path = Path(cache_dir or cache_folder()) / 'addresses' / key / PurePosixPath(urlsplit(url).path).name
    with exclusive(path):
        if path.is_file():
            return path
        if constants.HF_HUB_OFFLINE:
            raise WeightsError(f'{url} is not in the cache, and HF_HUB_OFFLINE forbids downloads')
        part = path.with_name(f'{path.stem}.part{path.suffix}')
        try:
            transfer(url, part, LARGEST)
            read_checkpoint(part)
        except TransferError as error:
            raise WeightsError(f'the weights cannot be downloaded: {error.reason}') from error
        except WeightsError as error:
            discard(part)
            raise WeightsError(f'{url}: {error}; it was removed') from error
        os.replace(part, path)
        discard(part)
    return path


def refuse_hybrid(name: PathLike, hybrid_options: Mapping[str, Any]) -> None:
    """Refuse published weights for a hybrid, whose mixers have other weights or use the same ones in another way.

    A file of the user's may be of the same hybrid; its keys and shapes are compared as always.

    Args:
        name: see `resolve`.
        hybrid_options: `HierarchicalBackbone.hybrid_options`; empty for a model with its family's own mixers.

    Raises:
        WeightsError: the weights are published and the model is a hybrid.
    """
    weights = published(name) if hybrid_options else None
    if weights is not None:
        options = ' and '.join(f'{key}={value!r}' for key, value in hybrid_options.items())
        raise WeightsError(f'{weights.name} was trained with the mixers of {weights.arch} and does not fit {options}: '
                           'leave these options out, or load a file that was trained with them')

