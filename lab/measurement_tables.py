"""Tables of committed benchmark records and of the resources that compiled kernels take."""
import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from subquad.tools.bench.metrics import conditions, metric_rows, speedup, time_rows
from subquad.tools.common.cli import UserError
from subquad.tools.engine.counting.counts import REPORTED
from subquad.tools.engine.zoo import create

from .documents import RECORDS, markdown, read_records
from .presets import CHOICE, CHOICE_OURS, CHOICE_SIZES, CHOICE_TIMM, GPU_DEFAULTS, PRESETS, Preset

Row = Tuple[str, str, str, str]
# The rows of the summary: preset, workload, what this package has, what it is compared with.
_SUMMARY = (
    ('mobilevitv2_100-batch8', 'eight 256 x 256 images', 'subquad_mobilevitv2_100', 'mobilevitv2_100'),
    ('choice-224', 'one 224 x 224 image', 'ppma_tiny', 'swin_tiny_patch4_window7_224'),
    ('choice-224', 'one 224 x 224 image', 'ppma_tiny', 'convnext_tiny'),
    ('choice-1024', 'one 1024 x 1024 image', 'myo_tiny', 'convnext_tiny'),
    ('choice-1024', 'one 1024 x 1024 image', 'ppma_tiny_crisscross', 'swin_tiny_patch4_window7_224'),
    ('choice-1024', 'one 1024 x 1024 image', 'ppma_tiny', 'convnext_tiny'),
    ('polyline_attention-50x80', '`polyline_attention` and the dense formula, 50 x 80 tokens', 'portable', 'dense'),
)
# From this time on, the order of the timed calls changes from round to round (commit 27ba197e02).
_RANDOM_ORDER_SINCE = '2026-11-21T12:09'


def _records(root: Path, pattern: str, family: str = '') -> List[Dict[str, Any]]:
    """The newest record of each preset on each processor or GPU, oldest first."""
    newest: Dict[Any, Dict[str, Any]] = {}
    for path in sorted((root / RECORDS).glob(pattern)):
        for record in read_records(path):
            key = record['preset'], record.get('gpu') or record['cpu']
            newest.pop(key, None)
            newest[key] = record
    return [record for record in newest.values() if not family or PRESETS[record['preset']].family == family]


def _by_cpu(root: Path, family: str) -> List[List[Dict[str, Any]]]:
    """Records measured on the same processor with the same number of threads."""
    records = _records(root, 'cpu*.jsonl', family)
    if not records:
        raise UserError(f'no benchmark records cpu*.jsonl in {root / RECORDS}')
    groups: Dict[Any, List[Dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record['cpu'], record['threads']), []).append(record)
    return list(groups.values())


def _table(records: Sequence[Dict[str, Any]], rows_of: Callable[[Dict[str, Any]], Sequence[Row]]) -> str:
    """Rows of records from one GPU, or one processor and number of threads, below a line that names both and commits.

    An asterisk marks records whose calls were timed in a fixed order.
    """
    rows = [[f"`{record['preset']}`" + ' *' * fixed_order(record), *row]
            for record in records for row in rows_of(record)]
    head = ['preset', 'metric', 'value', 'target', 'met']
    if not any(row[3] for row in rows):
        head, rows = head[:3], [row[:3] for row in rows]
    commits = ', '.join(dict.fromkeys(str(record['commit'])[:10] for record in records))
    note = '; presets with an asterisk were timed in a fixed order' * any(map(fixed_order, records))
    above = f"{conditions(records[-1])}, commit {commits}, {records[-1]['date'][:10]}{note}:"
    return f'{above}\n\n{markdown(head, rows)}'


def fixed_order(record: Dict[str, Any]) -> bool:
    """Whether the calls of a record were timed in the same order in every round."""
    return record['date'] < _RANDOM_ORDER_SINCE


def cpu_table(root: Path, family: str) -> str:
    """The newest metrics of the CPU presets, one table per processor and number of threads."""
    return '\n'.join(_table(records, metric_rows) for records in _by_cpu(root, family))


def cpu_times_table(root: Path, family: str) -> str:
    """The newest times and floors of the CPU presets, one table per processor and number of threads."""
    timed = ([record for record in records if record['times_ms']] for records in _by_cpu(root, family))
    return '\n'.join(_table(records, time_rows) for records in timed if records)


def newest_records(root: Path, presets: Sequence[str]) -> Dict[str, Dict[str, Any]]:
    """The newest records of some CPU presets, from the processor on which one of them was measured last."""
    records = [record for record in _records(root, 'cpu*.jsonl') if record['preset'] in presets]
    cpu = max(records, key=lambda record: record['date'])['cpu'] if records else None
    return {record['preset']: record for record in records if record['cpu'] == cpu}


def summary_table(root: Path) -> str:
    """Speed and memory of a few workloads beside what is used for them otherwise."""
    newest, rows = {record['preset']: record for record in _records(root, 'cpu*.jsonl')}, []
    for preset, workload, ours, other in _SUMMARY:
        if preset not in newest:
            raise UserError(f'the summary needs a record of {preset} in {root / RECORDS}')
        record = newest[preset]
        metrics = {m['name']: m['value'] for m in record['metrics']}
        fast = metrics.get(f'speed-up of {ours} over {other}') or speedup(record['times_ms'], ours, other)
        memory = [f"{metrics.get(f'{name}: peak memory') or record['peak_mb'][name]:.0f}" for name in (ours, other)]
        rows.append([workload, f'`{ours}`', f'`{other}`', f'{fast:.2f} x as fast', ' / '.join(memory), record['cpu']])
    return markdown(['workload, float32, 2 threads', 'this package', 'compared with', 'speed', 'peak memory, MB',
                     'processor'], rows)


def gpu_table(root: Path) -> str:
    """The newest metrics of the GPU presets; presets without a record are "not measured yet"."""
    records = _records(root, 'gpu*.jsonl')
    missing = [name for name in GPU_DEFAULTS if name not in {record['preset'] for record in records}]
    text = _table(records, lambda record: [*time_rows(record), *metric_rows(record)]) if records else ''
    if missing:
        text += '\n' if text else ''
        rows = [[f'`{name}`', PRESETS[name].description, targets(PRESETS[name]), 'not measured yet']
                for name in missing]
        text += markdown(['preset', 'description', 'target', 'measured'], rows)
    return text


def targets(preset: Preset) -> str:
    """The targets of an operator's or a model's preset in words."""
    words = [f'{least:g} x as fast as {name}' for name, least in preset.targets.get('min_speedup', {}).items()]
    words += [f'1/{least:g} of the memory of {name}'
              for name, least in preset.targets.get('min_memory_saving', {}).items()]
    if 'min_bandwidth_share' in preset.targets:
        words.append(f"{preset.targets['min_bandwidth_share']:.0%} of the copy bandwidth")
    return ', '.join(words) or '-'


def resources_table(root: Path) -> str:
    """Registers and memory of the kernels on sm_90, for bfloat16 and heads of 32 channels.

    Of several launches of one kernel in a case, the one with the most registers is shown.
    """
    rows, kind = [], ', bfloat16, 32 channels'
    for case, kernels in json.loads((root / RECORDS / 'resources_cuda-90.json').read_text()).items():
        if case.endswith(kind) and not any(word in case for word in ('multiplicative', '8 latent')):
            largest: Dict[str, Dict[str, Any]] = {}
            for k in sorted(kernels, key=lambda k: (k['stack'], k['registers'])):
                largest[k['kernel']] = k
            rows += [[case.removesuffix(kind), f'`{name}`', *(str(largest[name][key]) for key in
                      ('warps', 'registers', 'stack', 'shared'))]
                     for name in dict.fromkeys(k['kernel'] for k in kernels) if 'row_products' not in name]
    return markdown(['case', 'kernel', 'warps', 'registers', 'stack, bytes', 'shared memory, bytes'], rows)


def choice_table(root: Path) -> str:
    """Time and peak memory of each model for one image, in the order of their time at the smallest size."""
    records = newest_records(root, [preset.name for preset in CHOICE])
    missing = [preset.name for preset in CHOICE if preset.name not in records]
    if missing:
        raise UserError(f"no records of {', '.join(missing)} in {root / RECORDS}")
    ordered = [records[preset.name] for preset in CHOICE]
    times = ordered[0]['times_ms']
    names = sorted((*CHOICE_OURS, *CHOICE_TIMM), key=lambda name: times[name]['p50'] if name in times else math.inf)
    rows = [_choice_row(name, ordered) for name in names]
    head = ['model', 'parameters (M)', 'ImageNet-1k top-1 (reported)']
    head += [f'{side} x {side}: {what}' for side in CHOICE_SIZES for what in ('ms', 'MB')]
    commits = ', '.join(dict.fromkeys(str(record['commit'])[:10] for record in ordered))
    return f"{conditions(ordered[-1])}, commit {commits}, {ordered[-1]['date'][:10]}:\n\n{markdown(head, rows)}"


def _choice_row(name: str, records: List[Dict[str, Any]]) -> List[str]:
    cells = [f'`{name}`', f'{_parameters(name) / 1e6:.1f}', _accuracy(name)]
    for record in records:
        time: Optional[Dict[str, float]] = record['times_ms'].get(name)
        cells += [f"{time['p50']:.0f}" if time else 'not measured',
                  f"{record['peak_mb'][name]:.0f}" if name in record['peak_mb'] else 'not measured']
    return cells


def _accuracy(name: str) -> str:
    if name in CHOICE_TIMM:
        top1, side = CHOICE_TIMM[name]
        return f'{top1}' if side == 224 else f'{top1} at {side}'
    return str(REPORTED[name][2]) + ' at 256' * ('mobilevitv2' in name) if name in REPORTED else 'no weights'


def _parameters(name: str) -> int:
    return sum(p.numel() for p in create(name, device='meta').parameters())
