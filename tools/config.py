"""Config files: found by path or name, checked for misspelt keys before anything is built or written."""
import difflib
import inspect
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

from .cli import UserError, nearest, one_line, quiet


def configs_folder() -> Path:
    """Where the package's own configs lie."""
    import subquad.configs
    return Path(subquad.configs.__path__[0])


def known_configs() -> List[str]:
    """Names of the package's configs, without folder and ending."""
    return sorted(path.stem for path in configs_folder().glob('*/*.py'))


def find(name: str) -> Path:
    """The config file at this path, or the package's config of this name.

    Raises:
        UserError: neither; with the nearest names.
    """
    path = expanded(name)
    if path.is_file():
        return path
    for candidate in configs_folder().glob('*/*.py'):
        if path.parent == Path() and candidate.stem == path.name.removesuffix('.py'):
            return candidate
    known = known_configs()
    raise UserError(f"no config file {name!r}{nearest(path.stem, known) or '; there are ' + ', '.join(known)}")


def load(name: str, overrides: Optional[Dict[str, Any]] = None):
    """The config as an mmengine Config, `overrides` (dotted keys) merged in.

    Raises:
        UserError: no such file, not a config, or a misspelt key.
    """
    from mmengine.config import Config
    path = find(name)
    try:
        with quiet():                              # imports what the config names
            config = Config.fromfile(str(path))
        for key in overrides or {}:
            root = key.split('.')[0]
            if root not in config and root not in _runner_keys():
                raise UserError(f'--cfg-options {key}: no {root!r} in {path.name}{nearest(root, list(config))}')
        config.merge_from_dict(overrides or {})
    except UserError:
        raise
    except (Exception, SystemExit) as error:       # a config is a program: anything can come out of it
        raise UserError(f'{path}: {one_line(error)}') from error
    check_keys(config, path)
    return config


def check_keys(config, path: Path) -> None:
    """Refuse top-level keys that look like a misspelt argument of Runner; a config's own variables may have any name.

    mmengine would go on without what the key was meant to set. Keys inside a dict(type=...) are checked by the class.
    """
    known = _runner_keys()
    for key in config:
        if key in known:
            continue
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if close:
            raise UserError(f'{path}: unknown key {key!r}; did you mean {close[0]!r}?')
    if 'model' not in config:
        raise UserError(f"{path}: no 'model' in it; this is not a config to train or test with")
    for key in config:
        if key == 'model' or key.endswith(('_dataloader', '_cfg')) or key in ('optim_wrapper', 'randomness'):
            if not isinstance(config[key], (dict, type(None))):
                raise UserError(f'{path}: {key} must be a dict, got {config[key]!r}')


def _runner_keys() -> List[str]:
    from mmengine.runner import Runner
    return [*list(inspect.signature(Runner.__init__).parameters)[1:], 'custom_imports', 'allow_other_classes',
            'tta_model', *(f'{part}_pipeline' for part in ('train', 'val', 'test', 'tta'))]


def expanded(name: str) -> Path:
    """The path with ~ replaced.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f'{name}: {error}') from error


def writable_folder(folder: str) -> Path:
    """The folder, made where it is missing and tried by writing.

    Raises:
        UserError: it cannot be written to.
    """
    path = expanded(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f'cannot write to the folder {path} ({error.strerror or error})') from error
    return path
