"""Write the tables of README.md and the model cards.

Between `<!-- table: NAME -->` and `<!-- end of table -->` stands what this tool computes (`models`) or reads from
committed records (`cpu`, `mobilevitv2`, `myo`, `gpu`, `trained`, `resources`), never a figure written by hand.
"""
import argparse
import json
import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from ..common.cli import UserError

RECORDS = Path('model_cards') / 'benchmarks'
_TABLE = re.compile(r'(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)', re.DOTALL)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines) + '\n'


@lru_cache        # it stands in four files, and counting takes its time
def models_table(root: Path) -> str:
    """Parameters and MACs of our models, counted, and the authors' figures."""
    from ..engine.counting import count
    from ..engine.zoo import our_models
    rows = []
    for name in our_models():
        row = count(name)
        theirs = row['reported_by_authors']
        rows.append([f'`{name}`', str(row['size'][0]), f"{row['parameters']:,}", f"{row['macs'] / 1e9:.2f}",
                     f"{row['macs_of_weights'] / 1e9:.2f}", f"{row['macs_with_norms'] / 1e9:.2f}",
                     f"{theirs['parameters_M']} M, {theirs['gmacs']} G" if theirs else '-',
                     str(theirs['top1']) if theirs else '-'])
    return markdown(['model', 'image', 'parameters', 'GMACs', 'without token products', 'the latter with norms',
                     'reported by the authors', 'ImageNet-1k top-1, reported by the authors'], rows)


def _records(root: Path, pattern: str) -> List[Dict[str, Any]]:
    """The newest record of each preset on each processor or GPU, oldest first."""
    newest: Dict[Any, Dict[str, Any]] = {}
    for path in sorted((root / RECORDS).glob(pattern)):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            key = record['preset'], record.get('gpu') or record['cpu']
            newest.pop(key, None)
            newest[key] = record
    return list(newest.values())


def _measured(records: Sequence[Dict[str, Any]], only_targets: bool = False) -> str:
    """The figures of the records, or those with a target, under a line that says what they were measured with."""
    from .records import conditions, figures
    last = records[-1]
    rows = [[f"`{record['preset']}`", *cells] for record in records for cells in figures(record)
            if cells[2] or not only_targets]
    commits = ', '.join(dict.fromkeys(str(record['commit'])[:10] for record in records))
    return (f"{conditions(last)}, commit {commits}, {last['date'][:10]}:\n\n"
            + markdown(['preset', 'figure', 'value', 'target', 'met'], rows))


def _cpu(root: Path, only_targets: bool) -> str:
    records = _records(root, 'cpu*.jsonl')
    if not records:
        raise UserError(f'no benchmark records cpu*.jsonl in {root / RECORDS}')
    by_cpu = [[r for r in records if r['cpu'] == cpu] for cpu in dict.fromkeys(r['cpu'] for r in records)]
    return '\n'.join(_measured(group, only_targets) for group in by_cpu)


def cpu_table(root: Path) -> str:
    """The newest figures with targets, a table for each processor.

    Raises:
        UserError: no records.
    """
    return _cpu(root, only_targets=True)


def cpu_full_table(root: Path) -> str:
    """All the newest figures, a table for each processor.

    Raises:
        UserError: no records.
    """
    return _cpu(root, only_targets=False)


def gpu_table(root: Path) -> str:
    """The newest record of each GPU preset; what has none is "not measured yet"."""
    from .presets import GPU_DEFAULTS, PRESETS
    records = _records(root, 'gpu*.jsonl')
    missing = [name for name in GPU_DEFAULTS if name not in {record['preset'] for record in records}]
    text = _measured(records) if records else ''
    if missing:
        text += '\n' if text else ''
        rows = [[f'`{name}`', PRESETS[name].what, targets(PRESETS[name]), 'not measured yet'] for name in missing]
        text += markdown(['preset', 'what', 'target', 'measured'], rows)
    return text


def targets(preset: Any) -> str:
    """What a preset is held to, in words."""
    options = preset.measure.keywords
    words = [f'{least:g} x as fast as {name}' for name, least in (options.get('faster') or {}).items()]
    words += [f'1/{least:g} of the memory of {name}' for name, least in (options.get('leaner') or {}).items()]
    words += [f"{options['bandwidth']:.0%} of the copy bandwidth"] if options.get('bandwidth') else []
    return ', '.join(words) or '-'


def resources_table(root: Path) -> str:
    """What the kernels take of sm_90 for bfloat16 heads of 32 channels: the report of `subquad kernels --compile`, kept
    whole for every target in model_cards/benchmarks."""
    rows, kind = [], ', bfloat16, 32 channels'
    for case, kernels in json.loads((root / RECORDS / 'resources_cuda-90.json').read_text()).items():
        if case.endswith(kind) and not any(word in case for word in ('product', '8 latent')):
            rows += [[case.removesuffix(kind), f"`{k['kernel']}`", str(k['warps']), str(k['registers']),
                      str(k['stack']), str(k['shared'])] for k in kernels if not k['kernel'].startswith('row_products')]
    return markdown(['case', 'kernel', 'warps', 'registers', 'spilled, bytes', 'shared memory, bytes'], rows)


def _figures_of(root: Path, prefixes: Sequence[str]) -> str:
    """The newest CPU records of presets that begin so, figures only, a table for each processor."""
    records = [record for record in _records(root, 'cpu*.jsonl') if record['preset'].startswith(tuple(prefixes))]
    return '\n'.join(_measured([{**r, 'times_ms': {}, 'floor': None} for r in records if r['cpu'] == cpu])
                     for cpu in dict.fromkeys(r['cpu'] for r in records))


def trained_table(root: Path) -> str:
    """What `subquad test --record` wrote: the newest result of each config and its
    options."""
    lines = [json.loads(line) for line in (root / RECORDS / 'trained.jsonl').read_text().splitlines()]
    newest = {(line['config'], line['options']): line for line in lines}
    rows = [[f'`{config}`', options or '-', f"{line['accuracy/top1']:.1f} %"]
            for (config, options), line in sorted(newest.items()) if 'accuracy/top1' in line]
    return markdown(['config', 'options', 'top-1 on the test part'], rows)


def shapes_table(root: Path) -> str:
    """What `subquad test --record` wrote of detectors and segmenters: the newest result of each config and its
    options."""
    lines = [json.loads(line) for line in (root / RECORDS / 'trained.jsonl').read_text().splitlines()]
    newest = {(line['config'], line['options']): line for line in lines if 'accuracy/top1' not in line}
    measures = (('coco/bbox_mAP_50', 'box AP50', 100), ('coco/segm_mAP_50', 'mask AP50', 100), ('mIoU', 'mIoU', 1))
    rows = [[f'`{config}`', options.removeprefix('experiment_name=') or '-',
             *(f'{line[key] * scale:.1f}' if key in line else '-' for key, _, scale in measures)]
            for (config, options), line in sorted(newest.items())]
    return markdown(['config', 'options', *(f'{name}, %' for _, name, _ in measures)], rows)


def dense_table(root: Path) -> str:
    """Parameters and MACs of the detectors and segmenters whose MACs the authors report, beside their figures.

    Raises:
        UserError: MMDetection or MMSegmentation is not installed.
    """
    from ..engine.counting_configs import COUNTS, REPORTED, count_config
    rows = []
    for name, theirs in REPORTED.items():
        if 'gmacs' not in theirs:
            continue
        row = count_config(name)
        extra = row.get('parameters_of_auxiliary_head')
        rows.append([f'`{name}`', '{} x {}'.format(*row['size']),
                     f"{row['parameters']:,}" + (f' + {extra:,}' if extra else ''),
                     *(f'{row[key] / 1e9:.2f}' for key in COUNTS), f"{theirs['parameters_M']} M, {theirs['gmacs']} G",
                     f"{COUNTS[row['nearest_count']]}, {row['deviation_percent']:+.1f} %"])
    return markdown(['config', 'image', 'parameters (+ auxiliary head)', 'GMACs: all', 'weights', 'with norms',
                     'reported by the authors', 'nearest count'], rows)


TABLES: Dict[str, Callable[[Path], str]] = {
    'models': models_table, 'cpu': cpu_table, 'cpu_full': cpu_full_table, 'gpu': gpu_table,
    'mobilevitv2': partial(_figures_of, prefixes=('mobilevit', 'separable_attention')),
    'myo': partial(_figures_of, prefixes=('quadtree_solve', 'myo', 'denoising')),
    'trained': trained_table, 'shapes': shapes_table, 'dense': dense_table,
    'detector': partial(_figures_of, prefixes=('mask-rcnn',)), 'resources': resources_table}


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
    root = Path(__file__).resolve().parents[2]
    if not (root / 'setup.py').exists():
        raise UserError('subquad tables works on a checkout, and this is an installed package')
    stale = []
    pages = [root / 'README.md', root / 'kernels' / 'README.md', *sorted((root / 'docs').glob('*.md'))]
    for path in [*pages, *sorted((root / 'model_cards').glob('*.md'))]:
        text = path.read_text()
        new = updated(text, root)
        if new != text:
            stale.append(path.name)
            if not args.check:
                path.write_text(new)
    print(f"{'out of date' if args.check else 'written'}: {', '.join(stale)}" if stale else 'all tables are up to date')
    return 1 if args.check and stale else 0


if __name__ == '__main__':
    from ..common.cli import run
    run(main)
