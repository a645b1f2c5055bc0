"""Train one config with many options, and record each result: the recurrences of LCSM on associative recall and text.

Each sweep has the shape of a figure or a table of Qin et al. (2024), at a small size. All runs of a sweep take the same
steps. A run that the file of records already has is not repeated, so that an interrupted sweep continues.
"""
import argparse
import itertools
import json
from itertools import groupby
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

from subquad.tools.common.cli import UserError
from subquad.tools.engine.config import load
from subquad.tools.engine.records import append, environment

from .documents import RECORDS, markdown, read_records
from .short_training import train_and_test

LEARNING_RATE = 'optim_wrapper.optimizer.lr'


class Sweep(NamedTuple):
    """The name of a config, and the values of each option that is varied; all combinations are trained."""

    config: str
    options: Dict[str, Sequence[Any]]


SWEEPS: Dict[str, Sweep] = {
    # Expand and shrink of the token, and learned matrices.
    'recall': Sweep('lcsm_mqar-small', {'model.mixer': ('1-0-1-0', '1-1-1-0', '0-0-0-0', '0-1-0-0'),
                                        LEARNING_RATE: (5e-3, 1e-2)}),
    # Tables 4 and 6: text.
    'language': Sweep('lcsm_language-stdlib', {'model.mixer': ('1-1-1-4', '1-10-1-0')}),
}


def train_once(config_name: str, options: Dict[str, Any]) -> Dict[str, Any]:
    """Train a config with options and test the last weights; see `train_and_test`."""
    return train_and_test(load(config_name, options))


def combinations(options: Dict[str, Sequence[Any]]) -> Iterator[Dict[str, Any]]:
    """Yield every combination of the values."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values))


def run_sweep(name: str, file: Path, fixed: Dict[str, Any]) -> None:
    """Train every combination that the file lacks, and append a record of each.

    Args:
        name: name of the sweep.
        file: file of JSON lines.
        fixed: further options for all runs, which replace the sweep's values of the same key.
    """
    sweep = SWEEPS[name]
    for options in combinations({**sweep.options, **{key: (value,) for key, value in fixed.items()}}):
        if any((line['config'], line['options']) == (sweep.config, options) for line in read_records(file)):
            continue
        record = train_once(sweep.config, options)
        append(file, {'config': sweep.config, 'options': options, **record, **environment()})
        shown = '  '.join(f'{key} {value:.4g}' for key, value in record.items())
        print(' '.join(f'{key}={value}' for key, value in options.items()), '', shown, flush=True)


def _best(root: Path, config: str, score: Callable[[Dict[str, Any]], float]) -> List[List[Dict[str, Any]]]:
    """Return the runs of a config in groups of equal options but for the learning rate, the best one first.

    The groups are in the order of their best runs.
    """
    def options(run: Dict[str, Any]) -> str:
        return str(sorted((key, value) for key, value in run['options'].items() if key != LEARNING_RATE))

    runs = [run for run in read_records(root / RECORDS / 'sweeps.jsonl') if run['config'] == config]
    groups = [sorted(group, key=score, reverse=True) for _, group in groupby(sorted(runs, key=options), options)]
    return sorted(groups, key=lambda group: score(group[0]), reverse=True)


def _names(run: Dict[str, Any]) -> List[str]:
    """Return the recurrence, and the other options of a run."""
    others = [f"{key.rpartition('.')[2]}={value}" for key, value in run['options'].items()
              if key not in ('model.mixer', LEARNING_RATE)]
    return [f"`{run['options']['model.mixer']}`", ', '.join(others) or '-']


def recall_table(root: Path) -> str:
    """Accuracy of associative recall by recurrence: the best learning rate, and its training loss."""
    rows = [[*_names(runs[0]), f"{runs[0]['accuracy/top1']:.1f} %", f"{runs[0]['train_loss']:.3f}",
             f"{runs[0]['options'][LEARNING_RATE]:g} of {_rates(runs)}"]
            for runs in _best(root, 'lcsm_mqar-small', lambda run: run['accuracy/top1'])]
    return markdown(['recurrence', 'options', 'accuracy of the values', 'training loss', 'learning rate'], rows)


def _rates(runs: List[Dict[str, Any]]) -> str:
    return ', '.join(f'{rate:g}' for rate in sorted({run['options'][LEARNING_RATE] for run in runs}))


def language_table(root: Path) -> str:
    """Perplexity of the tiny language model by recurrence."""
    rows = [[*_names(runs[0]), f"{runs[0]['language/perplexity']:.2f}", f"{runs[0]['train_loss']:.3f}"]
            for runs in _best(root, 'lcsm_language-stdlib', lambda run: run['language/log_likelihood'])]
    return markdown(['recurrence', 'options', 'perplexity of a byte', 'training loss'], rows)


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm)
    parser = argparse.ArgumentParser('python -m lab.config_sweeps', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', choices=SWEEPS, help='name of the sweep')
    parser.add_argument('--record', default='sweeps.jsonl', metavar='FILE',
                        help='file of JSON lines to append to (default: sweeps.jsonl)')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE',
                        help='options of all runs, such as model.dim=128 train_cfg.max_epochs=64; VALUE is JSON or '
                        'text')
    args = parser.parse_args(argv)
    run_sweep(args.name, Path(args.record).expanduser(), dict(map(setting, args.cfg_options)))
    return 0


def setting(text: str) -> Sequence[Any]:
    """Return the key and the value of KEY=VALUE."""
    key, equals, value = text.partition('=')
    if not equals:
        raise UserError(f'--cfg-options takes KEY=VALUE, got {text!r}')
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
