"""The table of launch options: warps, pipeline stages and registers of each kernel, by target and size of its tile.

`launch_table.json` holds the table. A file named by the environment variable SUBQUAD_LAUNCH_TABLE, as `python -m
lab.tuning` writes it, adds rows to it or replaces them. This module needs no Triton.
"""
import json
import os
import re
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Union

VARIABLE = 'SUBQUAD_LAUNCH_TABLE'
SHIPPED = Path(__file__).with_name('launch_table.json')
_SECTION = re.compile(r'default|cuda(:\d+)?|hip(:gfx\w+)?')


class Launch(NamedTuple):
    """Launch options: warps per program, pipeline stages, and the most registers per thread (None: no maximum)."""
    warps: int
    stages: int
    registers: Optional[int]


class Size(NamedTuple):
    """What the options of a kernel depend on: bytes per element, channels of a tile, and the side of the tile."""
    bytes: int
    channels: int
    tile: int


class Key(NamedTuple):
    """A kernel and its size."""
    kernel: str
    size: Size


# Options by kernel, by target ('cuda:90', then 'cuda', then 'default') and by size. A row holds for tiles of up to its
# number of channels.
Table = Dict[str, Dict[str, Dict[Size, Launch]]]
# Options that take the place of the table's while candidates are tried, and the keys that were looked up meanwhile.
_trials: List[Mapping[Key, Launch]] = []
_looked_up: List[Dict[Key, Launch]] = []


def read(path: Union[str, Path]) -> Table:
    """Read a table from a JSON file.

    Raises:
        ValueError: there is no such file, or it holds no launch table; the message names the file.
    """
    table: Table = {}
    try:
        for kernel, sections in json.loads(Path(path).read_text())['kernels'].items():
            for section, rows in sections.items():
                if not _SECTION.fullmatch(section):
                    raise ValueError(f'{kernel}: a target is default, cuda, cuda:90, hip or '
                                     f'hip:gfx942, not {section!r}')
                found = table.setdefault(kernel, {}).setdefault(section, {})
                for row in rows:
                    if len(row) != 6 or not all(isinstance(x, int) and x > 0 for x in row[:5]):
                        raise ValueError(f'{kernel}, {section}: {row} is not [bytes, channels, tile, '
                                         'warps, stages, registers]')
                    found[Size(*row[:3])] = Launch(*row[3:])
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f'cannot read the launch table {path}: {error!r}') from error
    return table


def formatted(table: Table, **notes: Any) -> str:
    """Return the JSON text of a table, one line per row; `notes` (such as the device) are stored beside the kernels."""
    kernels = {kernel: {section: [[*size, *launch] for size, launch in sorted(rows.items())]
                        for section, rows in sorted(sections.items())}
               for kernel, sections in sorted(table.items())}
    columns = [*Size._fields, *Launch._fields]
    text = json.dumps({'columns': columns, **notes, 'kernels': kernels}, indent=2)
    return re.sub(r'\[[^][]*\]', lambda row: f"[{' '.join(row[0][1:-1].split())}]", text) + '\n'


def merged(first: Table, second: Table) -> Table:
    """Return the rows of both tables; where both have a row, that of the second."""
    result = {kernel: {section: dict(rows) for section, rows in sections.items()} for kernel, sections in first.items()}
    for kernel, sections in second.items():
        for section, rows in sections.items():
            result.setdefault(kernel, {}).setdefault(section, {}).update(rows)
    return result


@lru_cache(maxsize=4)
def _loaded(path: str) -> Table:
    shipped = read(SHIPPED)
    if not path:
        return shipped
    try:
        return merged(shipped, read(path))
    except ValueError as error:
        raise ValueError(f'{VARIABLE}: {error}') from error


@lru_cache(maxsize=None)
def _find(path: str, kernel: str, size: Size, backend: str, arch: str) -> Launch:
    sections = _loaded(path).get(kernel, {})
    fitting = [(row.channels, order, launch)
               for order, section in enumerate((f'{backend}:{arch}', backend, 'default'))
               for row, launch in sections.get(section, {}).items()
               if (row.bytes, row.tile) == (size.bytes, size.tile) and row.channels >= size.channels]
    if not fitting:
        raise ValueError(f'the launch table has no row of {kernel} for {size.bytes} bytes an element, {size.channels} '
                         f'channels and tiles of {size.tile}')
    return min(fitting, key=lambda found: found[:2])[2]


def find(key: Key, backend: str, arch: str) -> Launch:
    """Return the options of a kernel: the row with the fewest channels that suffice; of two, the target's own.

    Raises:
        ValueError: there is no row, or the file that SUBQUAD_LAUNCH_TABLE names cannot be used.
    """
    for trial in reversed(_trials):
        if key in trial:
            return trial[key]
    launch = _find(os.environ.get(VARIABLE, ''), *key, backend, arch)
    for record in _looked_up:
        record[key] = launch
    return launch


@contextmanager
def trying(launches: Mapping[Key, Launch]) -> Iterator[None]:
    """Use these options inside the block instead of the table's."""
    _trials.append(launches)
    try:
        yield
    finally:
        _trials.pop()


@contextmanager
def looking_up() -> Iterator[Dict[Key, Launch]]:
    """Collect the rows that launches inside the block look up, with their options."""
    record: Dict[Key, Launch] = {}
    _looked_up.append(record)
    try:
        yield record
    finally:
        _looked_up.remove(record)
