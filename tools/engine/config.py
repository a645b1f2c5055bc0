"""Config files: found by path or name, checked for misspelt keys before anything is built or written."""
import difflib
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from ..common.cli import UserError, nearest, one_line, quiet
from ..common.paths import expanded
from .options import check_options, read_entries

# Entries that act while a config file is read, or only by what uses them in it.
_READ_IN_FILES = ('custom_imports', 'data_preprocessor', 'data_root', 'work_dir', 'log_level', 'cfg',
                  *(f'{part}_pipeline' for part in ('train', 'val', 'test')))


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
        UserError: neither; with the nearest names, or the new one of a config that was renamed.
    """
    from .renamed import refuse_old_name
    path = expanded(name)
    try:
        if path.is_file():
            return path
    except OSError as error:                       # a name that is too long, for one
        raise UserError(f'{name}: {error.strerror or error}') from error
    for candidate in configs_folder().glob('*/*.py'):
        if path.parent == Path() and candidate.stem == path.name.removesuffix('.py'):
            return candidate
    refuse_old_name(name)
    known = known_configs()
    raise UserError(f"no config file {name!r}{nearest(path.stem, known)} (subquad configs lists them)")


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
        check_keys(config, path)
        if overrides:
            with quiet():                          # it imports the classes whose arguments it compares
                check_options(config, overrides, path.name)
            config.merge_from_dict(overrides)
    except UserError:
        raise
    except (Exception, SystemExit) as error:       # a config is a program: anything can come out of it
        raise UserError(f'{path}: {one_line(error)}') from error
    check_types(config, path)
    return config


def check_keys(config, path: Path) -> None:
    """Warn of variables that look like a misspelt entry: of a name like one, and used by nothing in the file.

    A config's own variables may have any name. Keys inside a dict(type=...) are checked by the class.
    """
    known = [*read_entries(), *_READ_IN_FILES]
    for key in config:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if close and key not in known and len(re.findall(rf'\b{re.escape(key)}\b', config.text)) < 2:
            print(f'warning: {path}: nothing uses {key!r}; did you mean {close[0]!r}?', file=sys.stderr)


def check_types(config, path: Path) -> None:
    """Refuse a config without a model, and entries that must be a dict and are none."""
    if 'model' not in config:
        raise UserError(f"{path}: no 'model' in it; this is not a config to train or test with")
    for key in config:
        if key == 'model' or key.endswith(('_dataloader', '_cfg')) or key in ('optim_wrapper', 'randomness'):
            if not isinstance(config[key], (dict, type(None))):
                raise UserError(f'{path}: {key} must be a dict, got {config[key]!r}')
