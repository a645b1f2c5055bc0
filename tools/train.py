"""Train a classifier, a detector or a segmenter from a config file."""
import argparse
import os
import sys
from pathlib import Path
from typing import List, Optional

from .common.cli import UserError
from .engine.config import LOGGERS, add_config_arguments, find, is_classifier, training_config


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    words = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(words)
    _check(args)
    config = training_config(args)
    from .engine.training.run import resume_command, run_training
    work_dir = args.work_dir or _work_dir(args)
    _set_start(config, args, work_dir)
    if args.dry_run:
        _show(config, args)
        return 0
    run_training(config, work_dir, log_level='INFO' if args.verbose else 'ERROR',
                 weights=None if config.get('resume') else args.weights, command=resume_command(words, args, work_dir))
    return 0


def _set_start(config, args: argparse.Namespace, work_dir: str) -> None:
    """Write into the config from which file the training starts, and whether it resumes.

    With --weights and --resume, it resumes if the run has a checkpoint.
    """
    from .engine.checkpoints.runner_checkpoints import checkpoint_to_resume, latest_checkpoint
    both = args.weights and args.resume is not None
    if args.weights and not (both and latest_checkpoint(Path(work_dir).expanduser())):
        config.load_from, config.resume = args.weights, False
        if both:
            _say(f'nothing to resume in {work_dir}: the training starts from the weights in {args.weights}')
    elif args.resume is not None or config.get('resume'):
        name = args.resume or ('' if args.resume == '' else config.get('load_from') or '')
        config.load_from, config.resume = checkpoint_to_resume(work_dir, name), True
        if both:
            _say(f'{config.load_from} is resumed: the weights in {args.weights} are not read')


def _say(text: str) -> None:
    """Print one line on stderr, from the main process only; the processes are not connected yet."""
    if int(os.environ.get('RANK', 0)) == 0:
        print(text, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('subquad train', description=__doc__,
                                     epilog='subquad configs [PATTERN] lists the configs of the package')
    add_config_arguments(parser, 'report it on stderr and leave it out or use another image; in validation, a detector '
                         'or segmenter gets a black image')
    parser.add_argument('--work-dir', metavar='FOLDER',
                        help='folder for checkpoints, weights and logs (default: runs/CONFIG)')
    parser.add_argument('--epochs', type=int,
                        help='number of epochs (default: the config\'s); the schedule is scaled to it')
    parser.add_argument('--seed', type=int,
                        help='seed of weights, data order and augmentation (default: the config\'s)')
    parser.add_argument('--amp', action='store_true',
                        help='train in mixed precision: bfloat16, or float16 with loss scaling on GPUs '
                             'without bfloat16')
    parser.add_argument('--weights', metavar='NAME_OR_FILE',
                        help='start from published weights such as ppma_tiny.in1k, or from those in a file; a '
                        'classifier\'s weights initialize the backbone of a detector or segmenter. A head for other '
                        'classes starts at random. With --resume, only if there is no checkpoint to resume')
    parser.add_argument('--resume', nargs='?', const='', metavar='CHECKPOINT',
                        help='resume from CHECKPOINT, a .pth file; without a value, from the last checkpoint in the '
                        'work folder. Other settings than before, such as another schedule or learning rate, '
                        'apply from there on')
    parser.add_argument('--log-to', nargs='+', choices=list(LOGGERS), metavar='LOGGER', default=[],
                        help='also log to tensorboard, wandb or mlflow, whose packages must be installed')
    parser.add_argument('--dry-run', action='store_true',
                        help='build model, data and optimizer of a classifier, print learning rate, weight decay and '
                        'drop path of every parameter, the schedule and the batch, and write nothing')
    parser.add_argument('--processes', type=int,
                        help='with --dry-run: number of processes (default: that of torchrun, or 1)')
    parser.add_argument('--json', action='store_true', help='with --dry-run: print everything as JSON')
    parser.add_argument('--verbose', action='store_true', help='also print the log of MMEngine')
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse values and combinations of options that are not allowed."""
    if args.epochs is not None and args.epochs < 1:
        raise UserError(f'--epochs must be at least 1, got {args.epochs}')
    if args.seed is not None and not 0 <= args.seed < 2 ** 32:
        raise UserError(f'--seed must be from 0 to 4294967295, got {args.seed}')
    if args.weights == '':
        raise UserError('--weights: the name of the weights is empty')
    if args.weights and args.resume:
        raise UserError('--weights and --resume CHECKPOINT exclude each other: the first starts a run, the second '
                        'continues one (--resume without a value resumes if there is a checkpoint)')
    if not args.dry_run and (args.processes is not None or args.json):
        raise UserError(f"--{'json' if args.json else 'processes'} is only for --dry-run")
    if args.processes is not None and args.processes < 1:
        raise UserError(f'--processes must be at least 1, got {args.processes}')
    if args.dry_run and args.resume is not None:
        raise UserError('--dry-run and --resume exclude each other: a resumed run has the options of its checkpoint')


def _show(config, args: argparse.Namespace) -> None:
    """Print what the config would train."""
    from .common.output import dumps
    from .engine.training.dry_run import dry_run, print_dry_run
    if not is_classifier(config):
        raise UserError(f'--dry-run is for classifiers, and {args.config} trains a detector or segmenter')
    found = dry_run(config, args.processes or int(os.environ.get('WORLD_SIZE', 1)))
    if args.json:
        print(dumps(found))
    else:
        print_dry_run(found)


def _work_dir(args: argparse.Namespace) -> str:
    """Return runs/CONFIG, or the folder of the run if its own config is resumed."""
    from .engine.checkpoints.runner_checkpoints import latest_checkpoint
    folder = find(args.config).parent
    if args.resume == '' and (latest_checkpoint(folder) or any(folder.glob('*.pth'))):
        return str(folder)
    return str(Path('runs') / Path(args.config).stem)
