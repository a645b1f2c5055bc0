"""Write the tables of README, docs and model cards.

A table stands between `<!-- table: NAME -->` or `<!-- table: NAME FAMILY -->` and `<!-- end of table -->`. Its content
is counted, or read from committed records and from the papers' figures in model_cards/claims.
"""
import argparse
import re
from pathlib import Path
from typing import Callable, Dict, List, Optional

from subquad.tools.common.cli import UserError
from subquad.tools.engine import zoo

from . import claims
from . import config_sweeps as sweeps
from . import export_matrix as exports
from . import measurement_tables as measurements
from . import mixer_tables as mixers
from . import model_tables as models
from .documents import ROOT

# Families with a model card.
FAMILIES = tuple(family for family in zoo.FAMILIES if not family.endswith('_sequence'))
# Tables of all families, or of one.
FAMILY_TABLES: Dict[str, Callable[[Path, str], str]] = {
    'models': models.models_table,
    'counts': models.counts_table,
    'dense': models.dense_table,
    'shapes': models.shapes_table,
    'trained': models.trained_table,
    'cpu': measurements.cpu_table,
    'cpu_times': measurements.cpu_times_table,
    'own_claims': claims.own_claims_table,
}
TABLES: Dict[str, Callable[[Path], str]] = {
    'summary': measurements.summary_table,
    'choice': measurements.choice_table,
    'gpu': measurements.gpu_table,
    'resources': measurements.resources_table,
    'recall': sweeps.recall_table,
    'language': sweeps.language_table,
    'comparison': mixers.comparison_table,
    'comparison_summary': mixers.summary_table,
    'comparison_times': mixers.times_table,
    'comparison_memory': mixers.memory_table,
    'comparison_macs': mixers.macs_table,
    'formats': exports.formats_table,
    'exports': exports.exports_table,
    'exports_dense': exports.dense_exports_table,
    'exports_summary': exports.exports_summary_table,
}
_TABLE = re.compile(r'(<!-- table: ([^\n]*?) -->\n)(.*?)(<!-- end of table -->)', re.DOTALL)
_MARKER = re.compile(r'<!-- (?:table: |end of table)')


def content(marker: str, root: Path) -> str:
    """Write one table.

    Args:
        marker: 'NAME' or 'NAME FAMILY'.
        root: The checkout.
    """
    name, _, family = marker.partition(' ')
    if name in TABLES and not family:
        return TABLES[name](root)
    if name in FAMILY_TABLES and family in ('', *FAMILIES):
        return FAMILY_TABLES[name](root, family)
    raise UserError(f"there is no table {marker!r}; there are {', '.join(TABLES)}, and of all or one of the families "
                    f"{', '.join(FAMILIES)}: {', '.join(FAMILY_TABLES)}")


def updated(text: str, root: Path) -> str:
    """Return the text with every marked table written again."""
    if len(_MARKER.findall(text)) != 2 * len(_TABLE.findall(text)):
        raise UserError('each "<!-- table: ... -->" needs its own "<!-- end of table -->"')
    return _TABLE.sub(lambda match: match[1] + content(match[2], root) + match[4], text)


def pages(root: Path) -> List[Path]:
    """The files whose tables are written."""
    found = [root / 'README.md', *sorted((root / 'docs').rglob('*.md')), *sorted((root / 'model_cards').glob('*.md'))]
    return [path for path in found if path.exists()]


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm)
    parser = argparse.ArgumentParser('python -m lab.tables', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='list the files that are out of date, and write nothing')
    args = parser.parse_args(argv)
    stale = []
    for path in pages(ROOT):
        text = path.read_text()
        try:
            new = updated(text, ROOT)
        except UserError as error:
            raise UserError(f'{path.relative_to(ROOT)}: {error}') from error
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if not args.check:
                path.write_text(new)
    print(f"{'out of date' if args.check else 'written'}: {', '.join(stale)}" if stale else 'all tables are up to date')
    return 1 if args.check and stale else 0


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
