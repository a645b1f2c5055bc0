"""Train a classifier from a config file."""
import argparse
import shutil
from pathlib import Path
from typing import List, Optional, Set

from .cli import UserError, one_line
from .config import known_configs, load


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `train` and `test` share."""
    from mmengine.config import DictAction

    class Options(DictAction):
        def __call__(self, parser, namespace, values, option_string=None):
            for value in values:
                if '=' not in value:
                    parser.error(f'{option_string} takes KEY=VALUE, got {value!r}')
            super().__call__(parser, namespace, values, option_string)

    parser.add_argument('config', help='a config file, or the name of one that comes with the package')
    parser.add_argument('--data', metavar='FOLDER', help='image folder with train/CLASS/* and val/CLASS/*, or '
                        'the files of MNIST, CIFAR-10 or Long Range Arena, as the config says')
    parser.add_argument('--model', metavar='NAME', help='another timm model than the config\'s')
    parser.add_argument('--cfg-options', nargs='+', action=Options, metavar='KEY=VALUE',
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
            raise UserError(f'{args.config} makes its data or has them already: it takes no --data')
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
    if args.seed is not None and not 0 <= args.seed < 2 ** 32:
        raise UserError(f'--seed must be from 0 to 4294967295, got {args.seed}')
    config = config_with_options(args)
    if args.epochs:
        scale_schedule(config, args.epochs)
    if args.seed is not None:
        config.randomness = dict(seed=args.seed)
    run_training(config, args.work_dir or str(Path('runs') / Path(args.config).stem),
                 log_level='INFO' if args.verbose else 'ERROR')
    return 0


def scale_schedule(config, epochs: int) -> None:
    """Train for `epochs` with a schedule of the same shape; phases that would be shorter than an epoch are left out."""
    factor = epochs / config.train_cfg.max_epochs
    config.train_cfg.max_epochs = epochs
    schedulers = config.get('param_scheduler') or []
    for scheduler in schedulers:
        for key in ('begin', 'end'):
            if key in scheduler:
                scheduler[key] = round(scheduler[key] * factor)
    config.param_scheduler = [s for s in schedulers if s.get('begin', 0) < s.get('end', epochs)]


def run_training(config, work_dir: str, log_level: str = 'ERROR') -> Path:
    """Train, and return the path of the weights to use: the best in validation where there was one, else the last.

    Raises:
        UserError: the config, the data or the folder do not fit; nothing has been written then.
    """
    from .classification.hooks import ProgressHook, WeightsHook
    from .classification.runner import build_runner
    folder = Path(work_dir).expanduser()
    before = set(folder.iterdir()) if folder.is_dir() else None
    progress, weights = ProgressHook(), WeightsHook()
    try:
        build_runner(config, str(folder), training=True, hooks=[progress, weights], log_level=log_level).train()
    except Exception as error:
        progress.stop()
        if progress.started:
            raise
        # mmengine makes many parts only now; nothing has been learned, so nothing is to be kept.
        _undo(folder, before)
        raise error if isinstance(error, UserError) else UserError(f'config: {one_line(error)}') from error
    finally:
        progress.stop()
    path = folder / (weights.best_file or weights.last_file).name
    print(f'weights: {path}')
    return path


def _undo(folder: Path, before: Optional[Set[Path]]) -> None:
    """Remove what has come into the folder, and the folder where it was not there."""
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in set(folder.iterdir()) - before:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


if __name__ == '__main__':
    from .cli import run
    run(main)
