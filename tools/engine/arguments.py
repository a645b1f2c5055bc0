"""The arguments that `subquad train` and `subquad test` share, and the config that they ask for."""
import argparse
from pathlib import Path
from typing import Any

from ..common.cli import UserError
from .config import load


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `train` and `test` share."""
    from mmengine.config import DictAction

    class Options(DictAction):
        def __call__(self, parser, namespace, values, option_string=None):
            for value in values:
                if '=' not in value:
                    parser.error(f'{option_string} takes KEY=VALUE, got {value!r}')
            namespace.option_words = list(values)
            super().__call__(parser, namespace, values, option_string)

    parser.add_argument('config', help='a config file, or the name of one that comes with the package')
    parser.add_argument('--data', metavar='FOLDER', help='where the data lie: an image folder with train/CLASS/* and '
                        'val/CLASS/*, the files of MNIST, CIFAR-10 or Long Range Arena, or a detection or segmentation '
                        'config\'s data_root')
    parser.add_argument('--model', metavar='NAME', help='another timm model than the config\'s (classifiers)')
    parser.add_argument('--strict', action='store_true', help='stop at an image that cannot be read (default: it is '
                        'named on stderr, and training goes on with another one)')
    parser.add_argument('--cfg-options', nargs='+', action=Options, metavar='KEY=VALUE',
                        help='change config entries, such as optim_wrapper.optimizer.lr=1e-3: KEY is an entry of the '
                        'config, an argument of mmengine\'s Runner, or an argument of the class that the type of its '
                        'dict names; any other is an error, as are variables that the config file has used up')


def config_with_options(args: argparse.Namespace):
    """The config that the command line asks for.

    Raises:
        UserError: see `load`; or --data for a config that reads no folder.
    """
    changes = dict(args.cfg_options or {})
    config = load(args.config, changes)
    if args.strict:
        config.strict_images = True
    if args.model:
        if not is_classifier(config):
            raise UserError('--model is for classifiers; a detector\'s or segmenter\'s backbone: --cfg-options '
                            'model.backbone.arch=small')
        config.model.name = args.model
    if args.data:
        _move_data(config, args)
    return config


def is_classifier(config) -> bool:
    """Whether the config is one of this package's for classification, or of MMDetection or MMSegmentation."""
    return config.model.get('type') == 'TimmClassifier'


def _move_data(config, args: argparse.Namespace) -> None:
    """Read the data of --data."""
    if not is_classifier(config):
        if 'data_root' not in config:
            raise UserError(f'{args.config} has no data_root: it takes no --data')
        old, new = str(config.data_root).rstrip('/'), str(Path(args.data).expanduser())
        if not old:
            raise UserError(f'{args.config} has an empty data_root: it takes no --data')
        config.merge_from_dict(_moved(config.to_dict(), old, new))
        return
    loaders = [config[key] for key in ('train_dataloader', 'val_dataloader', 'test_dataloader') if key in config]
    if not any('root' in loader.dataset for loader in loaders):
        raise UserError(f'{args.config} makes its data or has them already: it takes no --data')
    for loader in loaders:
        loader.dataset.root = str(Path(args.data) / Path(loader.dataset.root).name)


def _moved(value: Any, old: str, new: str) -> Any:
    """The value with every path below folder `old` below `new`: evaluators have paths of their own."""
    if isinstance(value, dict):
        return {key: _moved(item, old, new) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, old, new) for item in value)
    below = isinstance(value, str) and (value == old or value.startswith(old + '/'))
    return new + value[len(old):] if below else value
