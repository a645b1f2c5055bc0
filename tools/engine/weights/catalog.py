"""Choose, describe, download and verify published weights for `subquad weights`."""
import fnmatch
from dataclasses import asdict
from typing import Any, Dict, List

from ....backbones.weights import WeightsError
from ....backbones.weights.cache import locked_entry, sha256_of
from ....backbones.weights.download import cached_file, check, fetch, renew
from ....backbones.weights.registry import WEIGHTS, PublishedWeights, find
from ...common.cli import UserError, nearest

GOOD = ('ok', 'no known hash')      # what `verify` returns for files that may be used


def matching(pattern: str) -> List[PublishedWeights]:
    """Return the weights whose names match a pattern or contain a text."""
    names = fnmatch.filter(WEIGHTS, pattern if _is_pattern(pattern) else f'*{pattern}*')
    if not names:
        raise UserError(f'no weights match {pattern!r}{nearest(pattern, list(WEIGHTS))} (`subquad weights list` shows '
                        'all)')
    return [WEIGHTS[name] for name in names]


def named(names: List[str]) -> List[PublishedWeights]:
    """Return the weights of names, as `find` does, and of patterns, each once."""
    found = [weights for name in names for weights in (matching(name) if _is_pattern(name) else [find(name)])]
    return list({weights.name: weights for weights in found}.values())


def describe(weights: PublishedWeights) -> Dict[str, Any]:
    """Return all fields of published weights, their entry in the lock file, and their file in the cache or None."""
    path, locked = cached_file(weights), locked_entry(weights.name, weights.source)
    return {'name': weights.name, **asdict(weights), 'source': weights.source,
            'locked': asdict(locked) if locked else None, 'cached': str(path) if path else None}


def download(weights: PublishedWeights, update: bool = False) -> Dict[str, Any]:
    """Download weights that are not in the cache, and return their path, size and hash.

    `update` takes the present file, although another was downloaded first.
    """
    path = renew(weights) if update else fetch(weights)
    return dict(name=weights.name, path=str(path), size=path.stat().st_size, sha256=sha256_of(path))


def verify(weights: PublishedWeights) -> str:
    """Check the file of weights in the cache. Return one of `GOOD`, or a sentence that says what is wrong."""
    path = cached_file(weights)
    if path is None:
        return f'not in the cache; `subquad weights download {weights.name}` gets it'
    try:
        return 'ok' if check(weights, path) else 'no known hash'
    except WeightsError as error:
        return str(error)


def in_cache() -> List[PublishedWeights]:
    """Return all weights whose files are in the cache."""
    return [weights for weights in WEIGHTS.values() if cached_file(weights)]


def _is_pattern(name: str) -> bool:
    return any(letter in name for letter in '*?[')
