"""Print tables that are never cut, JSON without NaN, and progress on stderr."""
import json
import math
import sys
import time
from typing import Any, Iterable, Iterator, Sequence, TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .cli import shown

Item = TypeVar('Item')


def print_table(table: Table) -> None:
    """Print a table without cutting its cells.

    On a terminal, long cells are wrapped to its width. Elsewhere the table is as wide as its contents.
    """
    console = Console()
    for column in table.columns:
        column.overflow = 'fold'
    if not console.is_terminal:
        wide = console.options.update(width=100_000)
        width = Measurement.get(console, wide, table).maximum
        console = Console(width=max(width, len(str(table.title or ''))))
    console.print(table)


def add_row(table: Table, *cells: object) -> None:
    """Add a row of literal texts: brackets are not markup, and characters that cannot be printed are escaped."""
    table.add_row(*(Text(shown(text, longest=sys.maxsize)) for text in cells))


def print_rows(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table of literal texts."""
    table = Table(*headers)
    for row in rows:
        add_row(table, *row)
    print_table(table)


def dumps(value: Any, **options: Any) -> str:
    """Return json.dumps(value), with null for NaN and infinities, which JSON cannot hold."""
    return json.dumps(without_nan(value), allow_nan=False, **options)


def without_nan(value: Any) -> Any:
    """Replace every number that is not finite by None, in nested lists and dicts, too."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def progress(items: Sequence[Item], what: str, every: float = 10.) -> Iterator[Item]:
    """Yield the items and show progress on stderr: a bar on a terminal, else a line every few seconds.

    `what` is the plural of the items' name, such as 'images', and `every` the seconds between lines.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        from rich.progress import track
        yield from track(items, description=what, console=console, transient=True)
        return
    start = said = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - said >= every:
            left = (now - start) / done * (len(items) - done)
            print(f'{done} of {len(items)} {what}, about {left:.0f} s left', file=sys.stderr, flush=True)
            said = now
        yield item
