"""The table of "Which model?": models of this package beside timm's, one image at a time, at three sizes."""
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ..common.cli import UserError
from ..engine.counting import REPORTED
from .comparisons import compare_models
from .markdown import RECORDS, markdown
from .metrics import conditions
from .preset import Preset

SIZES = (224, 512, 1024)
OURS = ('ppma_tiny', 'ppma_tiny_crisscross', 'subquad_mobilevitv2_050', 'subquad_mobilevitv2_100', 'myo_tiny',
        'lcsm_tiny')
# timm's models: ImageNet-1k top-1 without further data, in percent, and the image size of the test, as timm lists them
# (results/results-imagenet.csv of huggingface/pytorch-image-models, commit 0173a139).
TIMM: Dict[str, Tuple[float, int]] = {
    'tf_efficientnetv2_b0': (78.4, 224), 'edgenext_small': (81.6, 320), 'convnextv2_nano': (82.5, 288),
    'resnet50': (80.7, 224), 'swin_tiny_patch4_window7_224': (81.4, 224), 'pvt_v2_b2_li': (82.2, 224),
    'convnext_tiny': (82.7, 288)}
# What a record needs for the table: it is measured from the package's models and timm's together.
PRESETS = [Preset(
    name=f'choice-{side}',
    description=f'models of this package and of timm, one {side} x {side} image',
    measure=compare_models,
    options=dict(names=(*OURS, *TIMM), size=(side, side), batch=1),
    repeats=7 if side < 1000 else 5) for side in SIZES]


def choice_table(root: Path) -> str:
    """Time and peak memory of each model for one image, in the order of their time at the smallest size.

    Raises:
        UserError: A preset has no record.
    """
    from .measurement_tables import newest_records
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
    from ..engine.zoo import create
    return sum(p.numel() for p in create(name, device='meta').parameters())
