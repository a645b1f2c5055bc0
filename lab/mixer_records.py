"""Records of the comparison of mixers: one line of JSON a cell."""
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from subquad.tools.common.cli import UserError

from .documents import read_records
from .mixer_tasks import TASKS

# What tables and lists read of each record.
_KEYS = ('task', 'mixer', 'seed', 'recipe', 'cell_seconds', 'threads', 'torch', 'commit', 'modified', 'date')

Runs = Dict[Tuple[str, str], List[Dict[str, Any]]]


class Selection(NamedTuple):
    """The records that a table or a plot shows.

    Attributes:
        tasks, mixers, seeds: names and seeds; None for all that the file has, and for those compared by default.
        recipes: digest of the recipe of each task; None for the one that a task was last run with.
    """

    tasks: Optional[Sequence[str]] = None
    mixers: Optional[Sequence[str]] = None
    seeds: Optional[Sequence[int]] = None
    recipes: Optional[Mapping[str, str]] = None


EVERYTHING = Selection()


def cell_records(file: Path) -> List[Dict[str, Any]]:
    """Return all records of a file; none if it does not exist.

    Raises:
        UserError: the file cannot be read or is not one of records of this comparison.
    """
    lines = read_records(file)
    for number, line in enumerate(lines, 1):
        problem = _problem(line)
        if problem:
            raise UserError(f'{file}, line {number}: {problem}')
    return lines


def _problem(line: Any) -> Optional[str]:
    if not isinstance(line, dict):
        return f'a record must be an object of JSON, got {type(line).__name__}'
    absent = [key for key in (*_KEYS, *(() if 'failed' in line else ('score',))) if key not in line]
    if absent:
        return f'the record has no {absent[0]}'
    if not isinstance(line['task'], str) or line['task'] not in TASKS:
        return f"there is no task {line['task']!r}"
    for key, kind, name in (('mixer', str, 'a name'), ('seed', int, 'an integer'), ('recipe', str, 'a digest'),
                            ('score', (int, float), 'a number')):
        if key in line and not isinstance(line[key], kind):
            return f'{key} must be {name}, got {line[key]!r}'
    return None


def runs(file: Path, chosen: Selection = EVERYTHING) -> Runs:
    """Return the selected records of each (task, mixer), one of each seed.

    A later record of a cell replaces earlier ones. Recipes are not mixed: a task has the records of one recipe.

    Raises:
        UserError: the file cannot be read or is not one of records of this comparison.
    """
    lines = cell_records(file)
    current = chosen.recipes if chosen.recipes is not None else {line['task']: line['recipe'] for line in lines}
    newest = {(line['task'], line['mixer'], line['seed']): line for line in lines
              if current.get(line['task']) == line['recipe']}
    found: Runs = {}
    for (task, mixer, seed), line in newest.items():
        if all(names is None or own in names for names, own in zip(chosen[:3], (task, mixer, seed))):
            found.setdefault((task, mixer), []).append(line)
    return found
