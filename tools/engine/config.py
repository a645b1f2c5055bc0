"""Find and read config files, and change them as the command line asks."""
import argparse
import difflib
import inspect
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from subquad_cli import config_names as known_configs
from subquad_cli import package_folder

from ..common.cli import UserError, nearest, need, one_line, place, quiet

# Name of `--log-to` -> MMEngine's backend and the package that it needs.
LOGGERS = {'tensorboard': ('TensorboardVisBackend', 'tensorboard'),
           'wandb': ('WandbVisBackend', 'wandb'), 'mlflow': ('MLflowVisBackend', 'mlflow')}
# Prefixes of timm's names of data sets.
TIMM_PREFIXES = ('wds', 'hfds', 'hfids', 'tfds')
# Arguments of the Runner that another flag sets, and how.
_ELSEWHERE = {'work_dir': '--work-dir', 'log_level': '--verbose', 'data_root': '--data'}
# Entries that these tools read beside the Runner's arguments.
_ALSO_READ = ('model_wrapper_cfg', 'find_unused_parameters', 'sync_bn', 'compile',
              'activation_checkpointing', 'efficient_conv_bn_eval', 'allow_other_classes',
              'strict_images', 'tta_model', 'tta_pipeline')
# Entries that act while a config file is read, or that only other entries of the file use.
_READ_IN_FILES = ('custom_imports', 'data_preprocessor', 'data_root', 'work_dir', 'log_level', 'cfg',
                  'train_pipeline', 'val_pipeline', 'test_pipeline')


def configs_folder() -> Path:
    """Return the folder of the package's own configs."""
    return package_folder('configs')


def find(name: str) -> Path:
    """Return the config file at a path, or the package's config of that name."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    for candidate in configs_folder().glob('*/*.py'):
        if path.parent == Path() and candidate.stem == path.name.removesuffix('.py'):
            return candidate
    known = known_configs()
    raise UserError(f'no config file {name!r}{nearest(path.stem, known)} (subquad configs lists them)')


def _check_bases(path: Path, above: Tuple[Path, ...] = ()) -> None:
    """Refuse a cycle of _base_ files, and name the one of them that has an error of syntax."""
    from mmengine.config import Config
    path = path.resolve()
    if path in above:
        chain = ' -> '.join(each.name for each in (*above[above.index(path):], path))
        raise UserError(f'{path}: the config is its own _base_ ({chain})')
    if path.suffix in ('.py', '.json', '.yaml', '.yml') and path.is_file():
        for base in Config._get_base_files(str(path)):
            if '::' not in base:                          # a file of MMDetection or MMSegmentation
                _check_bases(path.parent / base, (*above, path))


def load(name: str, overrides: Optional[Dict[str, Any]] = None,
         change: Optional[Callable[[Any], None]] = None):
    """Read a config and merge `overrides` (values by dotted key) into it.

    Args:
        name: Path of a config file, or name of one of the package's configs.
        overrides: New values, such as {'optim_wrapper.optimizer.lr': 1e-3}.
        change: Function that changes the config before the overrides are merged.

    Returns:
        An MMEngine Config.

    Raises:
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
        _check(config, path)
        if change:
            change(config)
        if overrides:
            check_options(config, overrides, path.name)
            config.merge_from_dict(overrides)
        _check_bounds(config.to_dict())
    except UserError:
        raise
    except (Exception, SystemExit) as error:       # a config is a program and can raise anything
        for library in ('mmdet', 'mmseg', 'mmcv'):
            if library in str(error):
                need(library)
        if isinstance(error, ImportError) and error.__cause__:   # MMEngine lists sys.path in its own
            error = error.__cause__
        raise UserError(f'{place(error) or f"{path}: "}{one_line(error)}') from error
    if config.get('default_scope') in ('mmdet', 'mmseg'):
        need(config.default_scope)
    return config


def _check(config: Any, path: Path) -> None:
    """Refuse a config without a model, and a variable with nearly the name of an entry that nothing uses.

    A config's own variables may have any other name. For a detector or segmenter, whose config can
    come from another library, such a variable is a warning. The class that a dict(type=...) names
    checks the keys of the dict.
    """
    if not isinstance(config.get('model'), dict):
        raise UserError(f"{path}: no 'model' in it; this is not a config to train or test with")
    if config.get('default_scope') == 'mmpretrain':
        raise UserError(f"{path} is a config of MMPretrain: use MMPretrain's tools/train.py and "
                        'tools/test.py')
    known = [*read_entries(), *_READ_IN_FILES]
    for key in config:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if close and key not in known and len(re.findall(rf'\b{re.escape(key)}\b', config.text)) < 2:
            message = f'{path}: nothing uses {key!r}; did you mean {close[0]!r}?'
            if is_classifier(config):
                raise UserError(message)
            print(f'warning: {message}', file=sys.stderr)


def _check_bounds(entries: Any, above: str = '') -> None:
    """Refuse numbers with which training runs but learns nothing, or the wrong thing."""
    for key, value in entries.items() if isinstance(entries, dict) else enumerate(entries):
        name = f'{above}{key}'
        if isinstance(value, (dict, list, tuple)):
            _check_bounds(value, f'{name}.')
        elif isinstance(value, (int, float)):
            if key in ('lr', 'layer_decay', 'max_norm', 'crop_pct') and value <= 0:
                raise UserError(f'{name} must be more than 0, got {value:g}')
            if key == 'lr' and value == float('inf'):
                raise UserError(f'{name} must be finite, got {value}')
            if key == 'weight_decay' and value < 0:
                raise UserError(f'{name} must be 0 or more, got {value:g}')


def is_classifier(config: Any) -> bool:
    """Whether the config trains a classifier; otherwise it is one of MMDetection or MMSegmentation."""
    return config.model.get('type') == 'TimmClassifier'


def read_entries() -> List[str]:
    """Return the top-level entries that are read after a config file has run."""
    from mmengine.runner import Runner
    skipped = ('self', 'cfg', 'custom_imports', *_ELSEWHERE)
    return [name for name in (*inspect.signature(Runner.__init__).parameters, *_ALSO_READ)
            if name not in skipped]


def check_options(config: Any, options: Dict[str, Any], name: str) -> None:
    """Refuse options, values by dotted key, that nothing reads, or that nearly spell an entry beside them.

    Any other new key is merged: the class that the `type` of its dict names accepts or refuses it.
    """
    entries = read_entries()
    for key, value in options.items():
        root, *rest = key.split('.')
        if root not in entries:
            keys = {inner: f'{entry}.{inner}' for entry in entries for inner in (
                config[entry] if isinstance(config.get(entry), dict) else ())} | {entry: entry for entry in entries}
            close = difflib.get_close_matches(root, keys, n=1)
            near = f'; did you mean {keys[close[0]]}?' if close else ''
            why = f'only used while {name} is read' if root in config else f'no entry of {name}'
            raise UserError(f'--cfg-options {key}: {root!r} is {why}'
                            + (f'; give {_ELSEWHERE[root]}' if root in _ELSEWHERE else near))
        node, above = config.get(root), root
        for part in rest:
            if isinstance(node, (list, tuple)):
                if not part.isdigit() or int(part) >= len(node):
                    raise UserError(f'--cfg-options {key}: {above} is a list of {len(node)} entries, from {above}.0 on')
                node = node[int(part)]
            elif isinstance(node, dict):
                close = difflib.get_close_matches(part, node, n=1, cutoff=0.85)
                if close and part not in node:
                    raise UserError(f'--cfg-options {key}: {above} has no {part!r}; did you mean {close[0]}? '
                                    '(A config file can add a new key.)')
                node = node.get(part)
            elif node is not None:
                raise UserError(f'--cfg-options {key}: {above} is {node!r}, which has no entries')
            above += f'.{part}'
        if isinstance(node, bool) and isinstance(value, str):      # any text counts as true
            raise UserError(f'--cfg-options {key} must be True or False, got {value!r}')


def add_config_arguments(parser: argparse.ArgumentParser, unreadable: str) -> None:
    """Add the arguments that `subquad train` and `subquad test` share.

    `unreadable` says what the command does by default with an image that cannot be read.
    """
    class Options(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            from mmengine.config import DictAction
            for value in values:
                if '=' not in value:
                    parser.error(f'{option_string} takes KEY=VALUE, got {value!r}')
            try:
                DictAction(self.option_strings, self.dest)(parser, namespace, values, option_string)
            except (AssertionError, RecursionError):
                parser.error(f'{option_string} takes numbers, words, and lists and tuples of them as '
                             f"VALUE, got {' '.join(values)!r}; write a dict into a config file that has "
                             'the config as _base_')

    parser.add_argument('config', help='path of a config file, or name of a config of the package '
                        '(subquad configs)')
    parser.add_argument('--data', metavar='FOLDER', help='data folder: an image folder with train/CLASS/* '
                        'and val/CLASS/*, or train.tar and val.tar; wds/FOLDER, hfds/NAME or tfds/NAME as '
                        'timm reads them; the files of MNIST, CIFAR-10 or Long Range Arena; or the '
                        'data_root of a detection or segmentation config')
    parser.add_argument('--model', metavar='NAME', help='timm model to use instead of the config\'s '
                        '(classifiers only)')
    parser.add_argument('--strict', action='store_true', help='stop at an image that cannot be read '
                        f'(default: {unreadable})')
    parser.add_argument('--cfg-options', nargs='+', action=Options, metavar='KEY=VALUE',
                        help='change config entries, such as optim_wrapper.optimizer.lr=1e-3. A variable '
                        'that the config file uses only while it is read, such as epochs, is an error.')


def config_with_options(args: argparse.Namespace):
    """Return the config that the command line of `subquad train` or `subquad test` asks for."""
    # --cfg-options can change the options that the data of --data have.
    config = load(args.config, args.cfg_options,
                  lambda config: _move_data(config, args) if args.data else None)
    if args.strict:
        config.strict_images = True
    if args.model:
        if not is_classifier(config):
            raise UserError('--model is for classifiers; change the backbone of a detector or segmenter '
                            'with --cfg-options model.backbone.arch=small')
        config.model.name = args.model
    return config


def training_config(args: argparse.Namespace):
    """Return the config that the command line of `subquad train` asks for."""
    config = config_with_options(args)
    if args.epochs:
        scale_schedule(config, args.epochs)
    if args.seed is not None:
        config.randomness = dict(seed=args.seed)
    if args.amp:
        _use_mixed_precision(config)
    if args.log_to:
        visualizer = config.get('visualizer') or dict(type='Visualizer')
        backends = list(visualizer.get('vis_backends') or [dict(type='LocalVisBackend')])
        known = {backend.get('type') for backend in backends}
        backends += [dict(type=kind) for kind in dict.fromkeys(LOGGERS[name][0] for name in args.log_to)
                     if kind not in known]
        config.visualizer = {**visualizer, 'vis_backends': backends}
    check_training(config)
    return config


def _move_data(config: Any, args: argparse.Namespace) -> None:
    """Point the data sets of the config at the folder of --data."""
    if not is_classifier(config):
        if not config.get('data_root'):
            raise UserError(f'--data is not supported: {args.config} has no data_root')
        old, new = str(config.data_root).rstrip('/'), str(Path(args.data).expanduser())
        config.merge_from_dict(_with_data_root(config.to_dict(), old, new))
        return
    prefix, _, root = args.data.partition('/')
    prefix = prefix.lower()
    named = dict(name=args.data, root=root if prefix == 'wds' else None) if prefix in TIMM_PREFIXES else None
    parts = [part for part in ('train', 'val', 'test') if config.get(f'{part}_dataloader')]
    if not named and not any('root' in config[f'{part}_dataloader'].dataset for part in parts):
        raise UserError(f'--data is not supported: {args.config} generates its data or takes them from a '
                        'package')
    for part in parts:
        loader = config[f'{part}_dataloader']
        folder = None if named else Path(args.data) / Path(loader.dataset.root).name
        tar = folder and not folder.exists() and folder.with_name(f'{folder.name}.tar')
        if named and loader.dataset.get('type') not in ('ImageFolder', 'TimmDataset'):
            raise UserError(f'--data {args.data} needs a config of image folders, such as '
                            'ppma-tiny_folder')
        if named or tar and tar.is_file() and loader.dataset.type == 'ImageFolder':
            split = 'train' if part == 'train' else 'validation'
            source = {**named, 'split': split} if named else dict(root=str(tar))
            kept = loader.dataset if loader.dataset.type == 'TimmDataset' else dict(
                type='TimmDataset', transform=loader.dataset.get('transform'))
            loader.dataset = {**kept, **source}
        else:
            loader.dataset.root = str(folder)


def _with_data_root(value: Any, old: str, new: str) -> Any:
    """Replace the folder `old` by `new` in every path of a value; evaluators have paths, too."""
    if isinstance(value, dict):
        return {key: _with_data_root(item, old, new) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_data_root(item, old, new) for item in value)
    below = isinstance(value, str) and (value == old or value.startswith(old + '/'))
    return new + value[len(old):] if below else value


def _use_mixed_precision(config: Any) -> None:
    """Train in bfloat16 on CPUs and on GPUs that support it, else in float16 with a loss scale."""
    import torch

    with quiet():
        import subquad.backbones.mm  # noqa: F401  (registers the wrapper for CPUs)
    if not torch.cuda.is_available():
        config.optim_wrapper.update(type='CPUAmpOptimWrapper')
    elif torch.cuda.is_bf16_supported():
        config.optim_wrapper.update(type='AmpOptimWrapper', dtype='bfloat16')
    else:
        config.optim_wrapper.update(type='AmpOptimWrapper', dtype='float16', loss_scale='dynamic')


def scale_schedule(config: Any, epochs: int) -> None:
    """Train for `epochs` epochs with a schedule of the same shape, without phases below one epoch."""
    if 'max_epochs' not in config.train_cfg:
        raise UserError('--epochs is not supported: the config counts iterations (use --cfg-options '
                        'train_cfg.max_iters=N)')
    if epochs == config.train_cfg.max_epochs:
        return
    factor = epochs / config.train_cfg.max_epochs
    config.train_cfg.max_epochs = epochs
    schedulers = config.get('param_scheduler') or []
    schedulers = [schedulers] if isinstance(schedulers, dict) else schedulers
    for scheduler in schedulers:
        if not scheduler.get('by_epoch', True):              # a warm-up that counts iterations keeps them
            continue
        for key in ('begin', 'end', 'T_max', 'step_size', 'milestones', 'warmup', 'delay'):
            if isinstance(scheduler.get(key), (list, tuple)):
                scheduler[key] = [max(1, round(step * factor)) for step in scheduler[key]]
            elif key in scheduler:
                scheduler[key] = max(int(key in ('T_max', 'step_size')), round(scheduler[key] * factor))
    config.param_scheduler = [each for each in schedulers if each.get('begin', 0) < each.get('end', epochs)
                              or not each.get('by_epoch', True)]


def check_training(config: Any) -> None:
    """Refuse a training of no length, or loggers whose package is missing; MMEngine finds both only in training."""
    for key in ('max_epochs', 'max_iters', 'val_interval'):
        planned = (config.get('train_cfg') or {}).get(key, 1)
        if not isinstance(planned, int) or planned < 1:
            raise UserError(f'train_cfg.{key} must be an integer of at least 1, got {planned!r}')
    for backend in (config.get('visualizer') or {}).get('vis_backends') or ():
        for kind, package in LOGGERS.values():
            if backend.get('type') == kind and find_spec(package) is None:
                raise UserError(f'{kind} needs {package}, which is not installed: pip install {package}')
