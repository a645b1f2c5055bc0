"""Write the tables of README.md and the model cards.

Between `<!-- table: NAME -->` and `<!-- end of table -->` stands what this tool computes (`models`) or reads from
committed benchmark records (`cpu`), never a figure written by hand.
"""
import argparse
import json
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from .cli import UserError

RECORDS = Path('model_cards') / 'benchmarks' / 'cpu.jsonl'
_TABLE = re.compile(r'(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)', re.DOTALL)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines) + '\n'


def models_table(root: Path) -> str:
    """Parameters and MACs of our models, counted, and the authors' figures."""
    from .stats import count
    from .zoo import our_models
    rows = []
    for name in our_models():
        row = count(name, 224, 224)
        theirs = row['reported_by_authors']
        rows.append([f'`{name}`', f"{row['parameters']:,}", f"{row['macs'] / 1e9:.2f}",
                     f"{row['macs_of_weights'] / 1e9:.2f}",
                     f"{theirs['parameters_M']} M, {theirs['gmacs_at_224']} G" if theirs else '-',
                     str(theirs['top1']) if theirs else '-'])
    return markdown(['model', 'parameters', 'GMACs at 224', 'without token products', 'reported by the authors',
                     'ImageNet-1k top-1, reported by the authors'], rows)


def cpu_table(root: Path) -> str:
    """The newest record of each CPU preset.

    Raises:
        UserError: no records.
    """
    try:
        records = [json.loads(line) for line in (root / RECORDS).read_text().splitlines()]
    except OSError as error:
        raise UserError(f'no benchmark records at {root / RECORDS}') from error
    newest: Dict[str, Dict[str, Any]] = {record['preset']: record for record in records}
    from .benchmark import figures
    rows = [[f'`{name}`', *cells] for name, record in newest.items() for cells in figures(record)]
    last = records[-1]
    return (f"{last['cpu']}, {last['threads']} threads, torch {last['torch']}, commit {str(last['commit'])[:10]}, "
            f"{last['date'][:10]}:\n\n" + markdown(['preset', 'figure', 'value', 'target', 'met'], rows))


TABLES: Dict[str, Callable[[Path], str]] = {'models': models_table, 'cpu': cpu_table}


def updated(text: str, root: Path) -> str:
    """The text with every marked table computed anew.

    Raises:
        UserError: a table that does not exist.
    """
    def table(match: re.Match) -> str:
        if match[2] not in TABLES:
            raise UserError(f"unknown table {match[2]!r}; there are {', '.join(TABLES)}")
        return match[1] + TABLES[match[2]](root) + match[3]
    return _TABLE.sub(table, text)


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm)
    parser = argparse.ArgumentParser('subquad tables', description=__doc__)
    parser.add_argument('--check', action='store_true', help='only say which files are out of date (exit code 1)')
    args = parser.parse_args(argv)
    root = Path(__file__).resolve().parent.parent
    if not (root / 'setup.py').exists():
        raise UserError('subquad tables works on a checkout, and this is an installed package')
    stale = []
    for path in [root / 'README.md', *sorted((root / 'model_cards').glob('*.md'))]:
        text = path.read_text()
        new = updated(text, root)
        if new != text:
            stale.append(path.name)
            if not args.check:
                path.write_text(new)
    print(f"{'out of date' if args.check else 'written'}: {', '.join(stale)}" if stale else 'all tables are up to date')
    return 1 if args.check and stale else 0


if __name__ == '__main__':
    from .cli import run
    run(main)
