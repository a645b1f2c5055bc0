"""The arguments that `subquad train` and `subquad test` share, and the config that they ask for."""
import argparse
from functools import reduce
from pathlib import Path
from typing import Any

from ..common.cli import UserError
from .config import load

# Prefixes of timm's names of data sets.
TIMM_PREFIXES = ('wds', 'hfds', 'hfids', 'tfds')
# Numbers that would train or test something else than what was meant, and whether they may be 0; none may be negative.
_BOUNDS = {'optim_wrapper.optimizer.lr': False, 'optim_wrapper.optimizer.layer_decay': False,
           'optim_wrapper.optimizer.weight_decay': True, 'optim_wrapper.clip_grad.max_norm': False,
           'optim_wrapper.clip_grad.clip_value': False,
           **{f'{part}_dataloader.dataset.transform.crop_pct': False for part in ('train', 'val', 'test')}}


def add_config_arguments(parser: argparse.ArgumentParser, unreadable: str) -> None:
    """Add the arguments that `subquad train` and `subquad test` share.

    Args:
        parser: The parser of the command.
        unreadable: What the command does by default with an image that cannot be read, for the help text.
    """
    class Options(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            from mmengine.config import DictAction
            for value in values:
                if '=' not in value:
                    parser.error(f'{option_string} takes KEY=VALUE, got {value!r}')
            namespace.option_words = list(values)
            try:
                DictAction(self.option_strings, self.dest)(parser, namespace, values, option_string)
            except (AssertionError, RecursionError):
                parser.error(f'{option_string} takes numbers, words, and lists and tuples of them as VALUE, got '
                             f"{' '.join(values)!r}; write a dict into a config file that has the config as _base_")

    parser.add_argument('config', help='path of a config file, or name of a config of the package (subquad configs)')
    parser.add_argument('--data', metavar='FOLDER', help='data folder: an image folder with train/CLASS/* and '
                        'val/CLASS/*, or train.tar and val.tar; wds/FOLDER, hfds/NAME or tfds/NAME as timm '
                        'reads them; the files of MNIST, CIFAR-10 or Long Range Arena; or the data_root of a '
                        'detection or segmentation config')
    parser.add_argument('--model', metavar='NAME', help='timm model to use instead of the config\'s (classifiers only)')
    parser.add_argument('--strict', action='store_true', help='stop at an image that cannot be read (default: '
                        f'{unreadable})')
    parser.add_argument('--cfg-options', nargs='+', action=Options, metavar='KEY=VALUE',
                        help='change config entries, such as optim_wrapper.optimizer.lr=1e-3. KEY is an entry of the '
                        'config, an argument of MMEngine\'s Runner, or an argument of the class that the type of its '
                        'dict names. Any other key is an error, or a note on stderr if it cannot be checked. A '
                        'variable that the config file uses only while it is read, such as epochs, is an error, too.')


def config_with_options(args: argparse.Namespace):
    """Return the config that the command line asks for.

    Raises:
        UserError: `load` refuses the config or an option, a number is out of its bounds, or the config does not support
            --data or --model.
    """
    changes = dict(args.cfg_options or {})
    # --cfg-options can change the options that the data of --data have.
    config = load(args.config, changes, lambda config: _move_data(config, args) if args.data else None)
    _check_bounds(config)
    if args.strict:
        config.strict_images = True
    if args.model:
        if not is_classifier(config):
            raise UserError('--model is for classifiers; change the backbone of a detector or segmenter with '
                            '--cfg-options model.backbone.arch=small')
        config.model.name = args.model
    return config


def _check_bounds(config) -> None:
    for key, zero in _BOUNDS.items():
        value = reduce(lambda node, part: node.get(part) if hasattr(node, 'get') else None, key.split('.'), config)
        if isinstance(value, (int, float)) and not (value > 0 or zero and value == 0):
            raise UserError(f"{key} must be {'0 or more' if zero else 'more than 0'}, got {value}")


def is_classifier(config) -> bool:
    """Whether the config trains a classifier; otherwise it is a config of MMDetection or MMSegmentation."""
    return config.model.get('type') == 'TimmClassifier'


def _move_data(config, args: argparse.Namespace) -> None:
    """Point the data sets of the config at the folder of --data."""
    if not is_classifier(config):
        if 'data_root' not in config:
            raise UserError(f'--data is not supported: {args.config} has no data_root')
        old, new = str(config.data_root).rstrip('/'), str(Path(args.data).expanduser())
        if not old:
            raise UserError(f'--data is not supported: the data_root of {args.config} is empty')
        config.merge_from_dict(_with_data_root(config.to_dict(), old, new))
        return
    prefix, _, root = args.data.partition('/')
    prefix = prefix.lower()
    named = dict(name=args.data, root=root if prefix == 'wds' else None) if prefix in TIMM_PREFIXES else None
    parts = [part for part in ('train', 'val', 'test') if config.get(f'{part}_dataloader')]
    if not named and not any('root' in config[f'{part}_dataloader'].dataset for part in parts):
        raise UserError(f'--data is not supported: {args.config} generates its data or takes them from a package')
    for part in parts:
        loader = config[f'{part}_dataloader']
        folder = None if named else Path(args.data) / Path(loader.dataset.root).name
        tar = folder and not folder.exists() and folder.with_name(f'{folder.name}.tar')
        if named and loader.dataset.get('type') not in ('ImageFolder', 'TimmDataset'):
            raise UserError(f'--data {args.data} needs a config of image folders, such as ppma-tiny_folder')
        if named or tar and tar.is_file() and loader.dataset.type == 'ImageFolder':
            source = {**named, 'split': 'train' if part == 'train' else 'validation'} if named else dict(root=str(tar))
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
