"""The table of "Which model?", from the records of its presets."""
from pathlib import Path
from typing import Any, Dict, List, Optional

from subquad.tools.bench.metrics import conditions
from subquad.tools.common.cli import UserError
from subquad.tools.engine.counting.counts import REPORTED
from subquad.tools.engine.zoo import create

from .choice import OURS, PRESETS, SIZES, TIMM
from .documents import RECORDS, markdown
from .measurement_tables import newest_records


def choice_table(root: Path) -> str:
    """Time and peak memory of each model for one image, in the order of their time at the smallest size.

    Raises:
        UserError: A preset has no record.
    """
    records = newest_records(root, [preset.name for preset in PRESETS])
    missing = [preset.name for preset in PRESETS if preset.name not in records]
    if missing:
        raise UserError(f"no records of {', '.join(missing)} in {root / RECORDS}")
    ordered = [records[preset.name] for preset in PRESETS]
    times = ordered[0]['times_ms']
    rows = [_row(name, ordered) for name in sorted((*OURS, *TIMM), key=lambda name: times[name]['p50'])]
    head = ['model', 'parameters (M)', 'ImageNet-1k top-1 (reported)']
    head += [f'{side} x {side}: {what}' for side in SIZES for what in ('ms', 'MB')]
    commits = ', '.join(dict.fromkeys(str(record['commit'])[:10] for record in ordered))
    return f"{conditions(ordered[-1])}, commit {commits}, {ordered[-1]['date'][:10]}:\n\n{markdown(head, rows)}"


def _row(name: str, records: List[Dict[str, Any]]) -> List[str]:
    cells = [f'`{name}`', f'{_parameters(name) / 1e6:.1f}', _accuracy(name)]
    for record in records:
        time: Optional[Dict[str, float]] = record['times_ms'].get(name)
        cells += [f"{time['p50']:.0f}" if time else 'not measured',
                  f"{record['peak_mb'][name]:.0f}" if name in record['peak_mb'] else 'not measured']
    return cells


def _accuracy(name: str) -> str:
    if name in TIMM:
        top1, side = TIMM[name]
        return f'{top1}' if side == 224 else f'{top1} at {side}'
    return str(REPORTED[name][2]) + ' at 256' * ('mobilevitv2' in name) if name in REPORTED else 'no weights'


def _parameters(name: str) -> int:
    return sum(p.numel() for p in create(name, device='meta').parameters())
