"""Tables of the records of `config_sweeps`: recall and perplexity by recurrence."""
from itertools import groupby
from pathlib import Path
from typing import Any, Callable, Dict, List

from .documents import RECORDS, markdown, read_records

LEARNING_RATE = 'optim_wrapper.optimizer.lr'
_FILE = 'sweeps.jsonl'


def _best(root: Path, config: str, score: Callable[[Dict[str, Any]], float]) -> List[List[Dict[str, Any]]]:
    """Return the runs of a config in groups of equal options but for the learning rate, the best one first.

    The groups are in the order of their best runs.
    """
    def options(run: Dict[str, Any]) -> str:
        return str(sorted((key, value) for key, value in run['options'].items() if key != LEARNING_RATE))

    runs = [run for run in read_records(root / RECORDS / _FILE) if run['config'] == config]
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
