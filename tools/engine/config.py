"""Find config files by path or name, read them, and check their keys before anything is built or written."""
import ast
import difflib
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from subquad_cli import config_names, package_folder

from ..common.cli import UserError, nearest, need, one_line, place, quiet
from ..common.paths import expanded
from .training.config_options import check_entries, check_options, read_entries

# Entries that act while a config file is read, or that only other entries of the file use.
_READ_IN_FILES = ('custom_imports', 'data_preprocessor', 'data_root', 'work_dir', 'log_level', 'cfg',
                  *(f'{part}_pipeline' for part in ('train', 'val', 'test')))


def configs_folder() -> Path:
    """Return the folder of the package's own configs."""
    return package_folder('configs')


def known_configs() -> List[str]:
    """Return the names of the package's configs, without folder and suffix."""
    return config_names()


def find(name: str) -> Path:
    """Return the config file at a path, or the package's config of that name.

    Raises:
        UserError: There is no such config. The error gives the nearest names.
    """
    path = expanded(name)
    try:
        if path.is_file():
            return path
    except OSError as error:                       # the name can be too long
        raise UserError(f'{name}: {error.strerror or error}') from error
    for candidate in configs_folder().glob('*/*.py'):
        if path.parent == Path() and candidate.stem == path.name.removesuffix('.py'):
            return candidate
    known = known_configs()
    raise UserError(f"no config file {name!r}{nearest(path.stem, known)} (subquad configs lists them)")


def load(name: str, overrides: Optional[Dict[str, Any]] = None, change: Optional[Callable[[Any], None]] = None):
    """Read a config and merge `overrides` (values by dotted key) into it.

    Args:
        name: Path of a config file, or name of one of the package's configs.
        overrides: New values, such as {'optim_wrapper.optimizer.lr': 1e-3}.
        change: Function that changes the config before the overrides are merged.

    Returns:
        An MMEngine Config.

    Raises:
        UserError: The file does not exist or is not a config, or a key is misspelled.
        ModuleNotFoundError: A library of an extra is missing.
    """
    path = find(name)
    if path.parent.parent == configs_folder() and path.parent.name in ('detection', 'segmentation'):
        need('mmcv')
    from mmengine.config import Config
    try:
        _check_bases(path)
        with quiet():                              # for what imported modules print
            config = Config.fromfile(str(path))
        check_keys(config, path)
        if _trains_classifier(config):
            with quiet():                          # the check imports the classes whose arguments it compares
                check_entries(config, path)
        if change:
            check_types(config, path)
            change(config)
        if overrides:
            with quiet():                          # the check imports the classes whose arguments it compares
                check_options(config, overrides, path.name)
            config.merge_from_dict(overrides)
    except UserError:
        raise
    except (Exception, SystemExit) as error:       # a config is a program and can raise anything
        for library in ('mmdet', 'mmseg', 'mmcv'):
            if library in str(error):
                need(library)
        if isinstance(error, ImportError) and error.__cause__:          # MMEngine lists sys.path in its own
            error = error.__cause__
        raise UserError(f'{place(error) or f"{path}: "}{one_line(error)}') from error
    if config.get('default_scope') in ('mmdet', 'mmseg'):
        need(config.default_scope)
    check_types(config, path)
    return config


def _check_bases(path: Path, above: Tuple[Path, ...] = ()) -> None:
    """Refuse a Python config that has a syntax error or a cycle of _base_ files, which MMEngine would read until the
    stack is full."""
    from mmengine.config import Config
    path = path.resolve()
    if path in above:
        chain = ' -> '.join(each.name for each in (*above[above.index(path):], path))
        raise UserError(f'{path}: the config is its own _base_ ({chain})')
    if path.suffix == '.py' and path.is_file():
        ast.parse(path.read_bytes(), str(path))
        for base in Config._get_base_files(str(path)):
            if '::' not in base:                          # a file of MMDetection or MMSegmentation
                _check_bases(path.parent / base, (*above, path))


def check_keys(config, path: Path) -> None:
    """Refuse a variable whose name is close to a known entry and that nothing in the file uses.

    A config's own variables may have any other name. For a detector or segmenter, whose config can come from another
    library, it is a warning. The class that a dict(type=...) names checks the keys of the dict.

    Raises:
        UserError: The config of a classifier has such a variable.
    """
    known = [*read_entries(), *_READ_IN_FILES]
    for key in config:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if close and key not in known and len(re.findall(rf'\b{re.escape(key)}\b', config.text)) < 2:
            message = f'{path}: nothing uses {key!r}; did you mean {close[0]!r}?'
            if _trains_classifier(config):
                raise UserError(message)
            print(f'warning: {message}', file=sys.stderr)


def _trains_classifier(config) -> bool:
    model = config.get('model')
    return isinstance(model, dict) and model.get('type') == 'TimmClassifier'


def check_types(config, path: Path) -> None:
    """Refuse a config that has no model, or an entry of a wrong type where a dict is required."""
    if 'model' not in config:
        raise UserError(f"{path}: no 'model' in it; this is not a config to train or test with")
    if config.get('default_scope') == 'mmpretrain':
        raise UserError(f"{path} is a config of MMPretrain: use MMPretrain's tools/train.py and tools/test.py")
    for key in config:
        if key == 'model' or key.endswith(('_dataloader', '_cfg')) or key in ('optim_wrapper', 'randomness'):
            if not isinstance(config[key], (dict, type(None))):
                raise UserError(f'{path}: {key} must be a dict, got {config[key]!r}')
