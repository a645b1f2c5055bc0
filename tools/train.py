"""Train a classifier, a detector or a segmenter from a config file."""
import argparse
import contextlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from .common import images
from .common.cli import UserError, one_line, quiet
from .engine.config import find, load
from .engine.lock import locked


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


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm and torchvision)
    parser = argparse.ArgumentParser('subquad train', description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter,
                                     epilog='subquad configs [PATTERN] lists the configs that come with the package')
    add_config_arguments(parser)
    parser.add_argument('--work-dir', metavar='FOLDER', help='where everything is written (default: runs/CONFIG)')
    parser.add_argument('--epochs', type=int, help='train for so many epochs instead of the config\'s')
    parser.add_argument('--seed', type=int, help='seed of weights, order and augmentation (default: the config\'s)')
    parser.add_argument('--amp', action='store_true', help='mixed precision: bfloat16 where the device has it')
    parser.add_argument('--weights', metavar='FILE', help='start from the weights of FILE, a classifier for a '
                        'detector\'s or segmenter\'s backbone; a classifier head of other classes starts at random')
    parser.add_argument('--resume', nargs='?', const='', metavar='CHECKPOINT',
                        help='go on from a .pth of an earlier run (default: the last one in the work folder)')
    parser.add_argument('--verbose', action='store_true', help='mmengine\'s own log on the screen as well')
    args = parser.parse_args(argv)
    if args.epochs is not None and args.epochs < 1:
        raise UserError(f'--epochs must be at least 1, got {args.epochs}')
    if args.seed is not None and not 0 <= args.seed < 2 ** 32:
        raise UserError(f'--seed must be from 0 to 4294967295, got {args.seed}')
    if args.weights == '':
        raise UserError('--weights: the name of the file is empty')
    if args.weights and args.resume is not None:
        raise UserError('--weights starts a training and --resume goes on with one: give one of them')
    from .engine.checkpoints import checkpoint_to_resume
    from .engine.messages import resume_command
    config = config_with_options(args)
    if args.epochs:
        scale_schedule(config, args.epochs)
    if args.seed is not None:
        config.randomness = dict(seed=args.seed)
    work_dir = args.work_dir or _work_dir(args)
    if args.amp:
        use_mixed_precision(config)
    if args.weights:
        config.load_from, config.resume = args.weights, False
    elif args.resume is not None or config.get('resume'):
        name = args.resume or ('' if args.resume == '' else config.get('load_from') or '')
        config.load_from, config.resume = checkpoint_to_resume(work_dir, name), True
    run_training(config, work_dir, log_level='INFO' if args.verbose else 'ERROR', weights=args.weights,
                 command=resume_command(args, work_dir))
    return 0


def _work_dir(args: argparse.Namespace) -> str:
    """runs/CONFIG; to resume with the config that lies in the folder of a run, that folder."""
    from .engine.checkpoints import latest_checkpoint
    folder = find(args.config).parent
    if args.resume == '' and latest_checkpoint(folder):
        return str(folder)
    return str(Path('runs') / Path(args.config).stem)


def use_mixed_precision(config) -> None:
    """bfloat16 on CPUs and on GPUs that have it, else float16 with a loss scale."""
    import torch

    with quiet():
        import subquad.backbones.mm  # noqa: F401  (registers the wrapper for CPUs)
    if not torch.cuda.is_available():
        config.optim_wrapper.update(type='CPUAmpOptimWrapper')
    elif torch.cuda.is_bf16_supported():
        config.optim_wrapper.update(type='AmpOptimWrapper', dtype='bfloat16')
    else:
        config.optim_wrapper.update(type='AmpOptimWrapper', dtype='float16', loss_scale='dynamic')


def scale_schedule(config, epochs: int) -> None:
    """Train for `epochs` with a schedule of the same shape; phases that would be shorter than an epoch are left out.

    Raises:
        UserError: the config counts iterations, or its number of epochs is not one.
    """
    if 'max_epochs' not in config.train_cfg:
        raise UserError('the config trains by iterations: --cfg-options train_cfg.max_iters=N in place of --epochs')
    planned = config.train_cfg.max_epochs
    if not isinstance(planned, int) or planned < 1:
        raise UserError(f'train_cfg.max_epochs must be an integer of at least 1, got {planned!r}')
    factor = epochs / planned
    config.train_cfg.max_epochs = epochs
    schedulers = config.get('param_scheduler') or []
    schedulers = [schedulers] if isinstance(schedulers, dict) else schedulers
    for scheduler in schedulers:
        if not scheduler.get('by_epoch', True):              # a warm-up of so many iterations stays one
            continue
        for key in ('begin', 'end', 'T_max', 'step_size', 'milestones'):
            if isinstance(scheduler.get(key), (list, tuple)):
                scheduler[key] = [max(1, round(step * factor)) for step in scheduler[key]]
            elif key in scheduler:
                scheduler[key] = max(key in ('T_max', 'step_size'), round(scheduler[key] * factor))
    config.param_scheduler = [s for s in schedulers if s.get('begin', 0) < s.get('end', epochs)
                              or not s.get('by_epoch', True)]


def run_training(config, work_dir: str, log_level: str = 'ERROR', weights: Optional[str] = None,
                 command: str = '') -> Path:
    """Train, and return the path of the weights to use: the best in validation where there was one, else the last.

    Args:
        config: mmengine Config.
        work_dir: where everything is written; no other training may be writing there.
        log_level: of mmengine's logger.
        weights: a file that a detector or segmenter starts from (a classifier: `load_from` of the config).
        command: goes on with this training after it was stopped.

    Raises:
        UserError: the config, the data or the folder do not fit, and nothing has been written then; or training cannot
            go on, because the loss is no longer finite or the disk is full.
    """
    from mmengine.dist import is_main_process

    from .engine.starting_weights import without_pretrained
    folder = Path(work_dir).expanduser()
    if weights and not is_classifier(config):
        config.load_from = None
        without_pretrained(config.model)
    vet_pretrained(config)
    first = int(os.environ.get('RANK', 0)) == 0
    with locked(folder) if first else contextlib.nullcontext():
        kept = _train(config, folder, log_level, weights, command)
    if is_main_process():
        print(f'weights: {kept}')
    return kept


def _train(config, folder: Path, log_level: str, weights: Optional[str], command: str) -> Path:
    """`run_training` in a folder that is locked."""
    from mmengine.dist import is_main_process

    from .engine.checkpoints import latest_checkpoint, stamp
    from .engine.hooks import ProgressHook, WeightsHook
    from .engine.messages import how_to_go_on, starting_point
    from .engine.starting_weights import StartHook
    hooks = [ProgressHook(starting_point(config, weights)), WeightsHook()]
    if is_classifier(config):
        from .engine.classification.runner import build_runner
    else:
        from .engine.dense.runner import build_runner
        if weights:
            hooks.append(StartHook(weights))
    progress, kept = hooks[:2]
    before = _contents(folder) if folder.is_dir() else {}
    earlier = None if config.get('resume') else stamp(latest_checkpoint(folder))
    unreadable = images.reported()
    try:
        with quiet() if log_level == 'ERROR' else contextlib.nullcontext():
            build_runner(config, str(folder), training=True, hooks=hooks, log_level=log_level).train()
    except KeyboardInterrupt:
        progress.stop()
        if is_main_process():
            print(how_to_go_on(folder, command, earlier), file=sys.stderr)
            if not progress.started:
                _undo(folder, before)
        raise
    except Exception as error:
        progress.stop()
        if is_main_process() and not progress.started:
            # mmengine makes many parts only now; nothing has been learned, so nothing is to be kept.
            _undo(folder, before)
        explained = _explained(error, folder, how_to_go_on(folder, command, earlier) if progress.started else '')
        if explained is error:
            raise
        raise explained from error
    finally:
        progress.stop()
    images.say_count(unreadable)
    return folder / (kept.best_file or kept.last_file).name


def _explained(error: Exception, folder: Path, go_on: str) -> Exception:
    """The error of a training as a UserError; itself where nothing is known of it and training had begun, so that there
    is a sentence on how to go on."""
    from .engine.messages import disk_full
    outside = re.search(r'Target (\d+) is out of bounds', str(error))
    if outside:
        return UserError(f'a label map has label {outside[1]}, more than the classes of the data set')
    full = disk_full(error)
    if full:
        return UserError(f"{full} while writing to {folder}; free some space{go_on and f'; {go_on}'}")
    if go_on or isinstance(error, UserError):
        return error
    return UserError(f'config: {one_line(error)}')


def vet_pretrained(config) -> None:
    """Refuse files that run code when they are read: what the config starts from goes through mmengine, which reads a
    pickle in the old way where the safe one fails.

    Raises:
        UserError: such a file, or one that is missing or damaged.
    """
    from ..backbones.weights import WeightsError, read_checkpoint
    for path in _pretrained(config.to_dict()):
        if '://' in path:                                    # a name or an address of mmengine's
            continue
        try:
            read_checkpoint(Path(path).expanduser())
        except WeightsError as error:
            raise UserError(str(error)) from error


def _pretrained(value: Any) -> Iterator[str]:
    """The files that init_cfg and load_from name."""
    if isinstance(value, dict):
        for key in ('load_from', 'checkpoint'):
            path = value.get(key)
            if isinstance(path, str) and path and (key == 'load_from' or value.get('type') == 'Pretrained'):
                yield path
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _pretrained(item)


def _contents(folder: Path) -> Dict[Path, Optional[bytes]]:
    """What is in the folder; of config files, which mmengine writes over, their bytes."""
    return {path: path.read_bytes() if path.suffix == '.py' else None for path in folder.iterdir()}


def _undo(folder: Path, before: Dict[Path, Optional[bytes]]) -> None:
    """Remove what a Runner writes before it trains, its config and its folder of logs; bring back the config that was
    there."""
    for path in set(folder.iterdir()) - set(before):
        if path.is_dir() and re.fullmatch(r'\d{8}_\d{6}', path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix == '.py':
            path.unlink()
    for path, content in before.items():
        if content is not None:
            path.write_bytes(content)


if __name__ == '__main__':
    from .common.cli import run
    run(main)
