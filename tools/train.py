"""Train a classifier from a config file."""
import argparse
from pathlib import Path
from typing import List, Optional

from .cli import UserError
from .config import known_configs, load


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `train` and `test` share."""
    from mmengine.config import DictAction
    parser.add_argument('config', help='a config file, or the name of one that comes with the package')
    parser.add_argument('--data', metavar='FOLDER', help='image folder with train/CLASS/* and val/CLASS/*')
    parser.add_argument('--model', metavar='NAME', help='another timm model than the config\'s')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE',
                        help='change config entries, such as optim_wrapper.optimizer.lr=1e-3')


def config_with_options(args: argparse.Namespace):
    """The config that the command line asks for.

    Raises:
        UserError: see `load`; or --data for a config that reads no folder.
    """
    changes = dict(args.cfg_options or {})
    config = load(args.config, changes)
    if args.model:
        config.model.name = args.model
    if args.data:
        loaders = [config[key] for key in ('train_dataloader', 'val_dataloader', 'test_dataloader') if key in config]
        if not any('root' in loader.dataset for loader in loaders):
            raise UserError(f'{args.config} does not read its images from a folder; --data goes with ppma-tiny_folder')
        for loader in loaders:
            loader.dataset.root = str(Path(args.data) / Path(loader.dataset.root).name)
    return config


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm and torchvision)
    parser = argparse.ArgumentParser('subquad train', description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter,
                                     epilog='configs that come with the package:\n  ' + '\n  '.join(known_configs()))
    add_config_arguments(parser)
    parser.add_argument('--work-dir', metavar='FOLDER', help='where everything is written (default: runs/CONFIG)')
    parser.add_argument('--epochs', type=int, help='train for so many epochs instead of the config\'s')
    parser.add_argument('--seed', type=int, help='seed of weights, order and augmentation (default: the config\'s)')
    parser.add_argument('--verbose', action='store_true', help='mmengine\'s own log on the screen as well')
    args = parser.parse_args(argv)
    if args.epochs is not None and args.epochs < 1:
        raise UserError(f'--epochs must be at least 1, got {args.epochs}')
    config = config_with_options(args)
    if args.epochs:
        config.train_cfg.max_epochs = args.epochs
        for scheduler in config.get('param_scheduler', []):
            scheduler['end'] = min(scheduler.get('end', args.epochs), args.epochs)
            scheduler['begin'] = min(scheduler.get('begin', 0), scheduler['end'] - 1)
    if args.seed is not None:
        config.randomness = dict(seed=args.seed)
    run_training(config, args.work_dir or str(Path('runs') / Path(args.config).stem),
                 log_level='INFO' if args.verbose else 'ERROR')
    return 0


def run_training(config, work_dir: str, log_level: str = 'ERROR') -> Path:
    """Train, and return the path of the weights to use: the best in validation where there was one, else the last.

    Raises:
        UserError: the config, the data or the folder do not fit; nothing has been written then.
    """
    from .classification.hooks import ProgressHook
    from .classification.runner import build_runner
    runner = build_runner(config, work_dir, training=True, log_level=log_level)
    try:
        runner.train()
    finally:
        for hook in runner.hooks:
            if isinstance(hook, ProgressHook):
                hook.stop()
    best, last = Path(work_dir) / 'best.safetensors', Path(work_dir) / 'last.safetensors'
    weights = best if best.exists() else last
    print(f'weights: {weights}')
    return weights


if __name__ == '__main__':
    from .cli import run
    run(main)
