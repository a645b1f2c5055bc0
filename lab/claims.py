"""Tables of the figures that the papers report, and of how each of them can be checked.

model_cards/claims/PAPER.yml has the tables of a paper as a list. The fields of a table are:
- title, note, data: Text above the table. `data` is what `check: data` needs.
- columns: For each column, how its figures are checked. `check: parameters` and `check: macs` count the network of a
  row (`subquad stats`). `check: data` needs data and the command of `test`, if there is one. `cannot: REASON` says why
  its figures cannot be checked.
- rows: A mapping for each network of this package: `row` is its name and `subject` the model or config. `size` and
  `options` change the counted model. `cannot: REASON` replaces `check: data`. Other networks are not transcribed.
A column may have `subject` and `test` of its own, and a row may have `subjects` by column. `test` may name {subject}
and, where the table or the row has `weights`, {weights}.

The figure '=' is one that the package has already: the entry `from` of the column in the numbers that `subquad stats`
shows for models, or in the metafile.yml of a config. `digits` rounds it as the paper does. A row without `figures` has
only such figures.
"""
import ast
import re
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

from subquad.tools.common.cli import UserError
from subquad.tools.engine.counting.counts import REPORTED

from .documents import markdown
from .model_tables import counted, counted_config

PAPERS = ('ppma', 'mobilevitv2', 'myo')          # the LCSM paper has no network of this package
CLAIMS = Path('model_cards') / 'claims'
CHECKED, DIFFERS = 'checked here', 'checked here and differs'
DATA, CANNOT = 'can be checked with the data', 'cannot be checked'
MARKS = (CHECKED, DIFFERS, DATA, CANNOT)
_UNIT = re.compile(r' \((M|%|ms)\)$')
_COUNTS = ('macs', 'macs_without_attention', 'macs_with_norms')


class Claim(NamedTuple):
    """One figure of a paper.

    Attributes:
        column: name of the column.
        figure: the figure as printed, '-' for none.
        mark: one of MARKS.
        detail: the command, the command and ': ' and what it counts, the reason, or ''.
    """
    column: str
    figure: str
    mark: str
    detail: str


class Row(NamedTuple):
    """One row of a table: its name and its figures."""
    name: str
    claims: List[Claim]


def tables(root: Path, paper: str) -> List[Dict[str, Any]]:
    """Read the tables of a paper. Every figure is text, so that it is shown as it was printed."""
    import yaml
    return yaml.load((root / CLAIMS / f'{paper}.yml').read_text(), yaml.BaseLoader)


def rows(root: Path, table: Dict[str, Any]) -> Iterator[Row]:
    """The rows of a table with the mark of each figure."""
    columns = table['columns']
    for entry in table['rows']:
        name, figures = entry['row'], entry.get('figures', ['='] * len(columns))
        if len(figures) != len(columns):
            raise UserError(f"{table['title']}: {name} needs {len(columns)} figures, got {len(figures)}")
        yield Row(name, [_claim(root, table, entry, *pair) for pair in zip(columns, figures)])


def _claim(root: Path, table: Dict[str, Any], entry: Dict[str, Any], column: str, figure: str) -> Claim:
    spec = table['columns'][column]
    subject = entry.get('subjects', {}).get(column) or spec.get('subject') or entry.get('subject')
    if figure == '=':
        figure = known_figure(root, subject, spec)
    check = spec.get('check')
    if check in ('parameters', 'macs'):
        size, options = entry.get('size'), entry.get('options', {})
        changes = ['--cfg-options', *(f'{key}={value}' for key, value in options.items())] if options else []
        command = ' '.join(['subquad stats', subject, *(['--size', size] if size else []), *changes])
        values = _counts(subject, check, size, options)
        if any(agree(figure, value) for value in values):
            return Claim(column, figure, CHECKED, command)
        nearest = min(values, key=lambda value: abs(value - float(figure)))
        return Claim(column, figure, DIFFERS, f'{command}: {nearest:.3g}')
    reason = spec.get('cannot') or entry.get('cannot')
    if reason:
        return Claim(column, figure, CANNOT, reason)
    weights = entry.get('weights', table.get('weights'))
    return Claim(column, figure, DATA, spec.get('test', table.get('test', '')).format(subject=subject, weights=weights))


def agree(figure: str, count: float) -> bool:
    """Whether a count rounds to a printed figure or is within 1 % of it."""
    decimals = len(figure.partition('.')[2])
    return round(count, decimals) == float(figure) or abs(count / float(figure) - 1) <= 0.01


def _counts(subject: str, check: str, size: Optional[str], options: Dict[str, str]) -> List[float]:
    """The counts of a model or config that a figure may mean, in M or G. Papers differ in what they count."""
    if _is_model(subject):
        values = {key: _literal(value) for key, value in options.items()}
        row = counted(subject, int(size) if size else None, **values)
    elif size or options:
        raise UserError(f'{subject} is a config, which is counted without size and options')
    else:
        row = counted_config(subject)
    if check == 'macs':
        return [row[key] / 1e9 for key in _COUNTS]
    return [row['parameters'] / 1e6, (row['parameters'] + row.get('parameters_of_auxiliary_head', 0)) / 1e6]


def _literal(text: str) -> Any:
    """The value of an option as `subquad stats --cfg-options` reads it."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _is_model(subject: str) -> bool:
    import timm
    return timm.is_model(subject)


def known_figure(root: Path, subject: str, spec: Dict[str, str]) -> str:
    """The figure of a model or config that the package has already, rounded as the paper does."""
    if _is_model(subject):
        known = dict(zip(('parameters_M', 'gmacs', 'top1'), map(str, REPORTED.get(subject, ()))))
    else:
        known = _metafiles(root).get(subject, {})
    if spec.get('from') not in known:
        raise UserError(f"{subject} has no figure {spec.get('from')!r}; there are {', '.join(known) or 'none'}")
    figure = known[spec['from']]
    if 'digits' in spec:
        figure = str(Decimal(figure).quantize(Decimal(1).scaleb(-int(spec['digits'])), ROUND_HALF_UP))
    return figure


@lru_cache
def _metafiles(root: Path) -> Dict[str, Dict[str, str]]:
    """The numbers that the authors report for each config, as text."""
    import yaml
    known = {}
    for file in (root / 'configs').glob('*/metafile.yml'):
        for model in yaml.load(file.read_text(), yaml.BaseLoader)['Models']:
            known[model['Name']] = {**model['Metadata'], **{key: value for result in model.get('Results', [])
                                                            for key, value in result['Metrics'].items()}}
    return known


def mark(claims: Sequence[Claim]) -> str:
    """Describe in words how the figures of a row are checked; columns of the same mark stand together."""
    groups: Dict[str, Dict[str, List[str]]] = {}
    for claim in sorted(claims, key=lambda claim: MARKS.index(claim.mark)):
        if claim.figure != '-':
            columns = groups.setdefault(claim.mark, {}).setdefault(claim.detail, [])
            columns.append(_UNIT.sub('', claim.column))
    if len(groups) == 1 and len(next(iter(groups.values()))) == 1:
        (kind, details), = groups.items()
        return kind + _in_parentheses(*details)
    return '; '.join(f"{kind}: " + ', '.join(', '.join(columns) + _in_parentheses(detail)
                                             for detail, columns in details.items())
                     for kind, details in groups.items())


def _in_parentheses(detail: str) -> str:
    """Write a detail after a column's name, commands as code."""
    command, _, value = detail.partition(': ')
    if command.startswith('subquad '):
        detail = f'`{command}`' + (f', which counts {value}' if value else '')
    return f' ({detail})' if detail else ''


def own_claims_table(root: Path, paper: str) -> str:
    """The tables of a paper, or of all papers for ''."""
    parts = []
    for name in [paper] if paper else PAPERS:
        for table in tables(root, name):
            lines = [[row.name, *(claim.figure for claim in row.claims), mark(row.claims)] for row in rows(root, table)]
            notes = [f"**{table['title']}.**", *([table['note']] if 'note' in table else []),
                     *([f"The data are {table['data']}."] if 'data' in table else [])]
            parts.append(' '.join(notes) + '\n\n' + markdown(['row', *table['columns'], 'mark'], lines))
    return '\n' + '\n'.join(parts) + '\n'
