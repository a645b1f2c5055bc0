"""Tables of models and configs: sizes, counts, and results of training."""
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from subquad.tools.engine.counting.counts import count
from subquad.tools.engine.zoo import our_models, takes_images

from .documents import RECORDS, markdown, read_records

_COUNT_HEADINGS = ('GMACs: all', 'without attention products',
                   'without attention products, with norms (as fvcore counts)')


def _models(family: str) -> List[str]:
    """The names of this package's models of images, of one family or, for '', of all."""
    return [name for name in of_family(our_models(), family) if takes_images(name)]


def of_family(names: Sequence[str], family: str) -> List[str]:
    """The names of models or configs that belong to a family; all of them for ''."""
    return [name for name in names if family in name.lower()]


@lru_cache        # several tables show the same counts, and counting takes time
def counted(name: str, side: Optional[int] = None, **options: Any) -> Dict[str, Any]:
    """The counts of a model, at its own input size or for square images, with options of the model."""
    return count(name, side, side, **options)


def models_table(root: Path, family: str) -> str:
    """Size, parameters and MACs of the models, without test models, and the accuracies that the authors report."""
    rows = []
    for name in _models(family):
        if name.startswith('test_'):
            continue
        row = counted(name)
        top1 = row['reported_by_authors'].get('top1')
        rows.append([f'`{name}`', str(row['size'][0]), f"{row['parameters'] / 1e6:.1f}", f"{row['macs'] / 1e9:.2f}",
                     '-' if top1 is None else str(top1)])
    return markdown(['model', 'image size', 'parameters (M)', 'GMACs', 'ImageNet-1k top-1, reported by the authors'],
                    rows)


def counts_table(root: Path, family: str) -> str:
    """All counts of the models, and the numbers that the authors report."""
    rows = []
    for name in _models(family):
        row = counted(name)
        theirs = row['reported_by_authors']
        rows.append([f'`{name}`', str(row['size'][0]), f"{row['parameters']:,}", *_counts(row),
                     _reported(theirs) if theirs else '-'])
    return markdown(['model', 'image size', 'parameters', *_COUNT_HEADINGS, 'reported by the authors'], rows)


def _reported(theirs: Dict[str, float]) -> str:
    return f"{theirs['parameters_M']} M" + (f", {theirs['gmacs']} G" if 'gmacs' in theirs else '')


def _counts(row: Dict[str, Any]) -> List[str]:
    return [f'{row[key] / 1e9:.2f}' for key in ('macs', 'macs_without_attention', 'macs_with_norms')]


@lru_cache
def counted_config(name: str) -> Dict[str, Any]:
    """The counts of a detection or segmentation config."""
    from subquad.tools.engine.counting.counting_configs import count_config
    return count_config(name)


def dense_table(root: Path, family: str) -> str:
    """All counts of the detectors and segmenters whose MACs the authors report, and their numbers."""
    from subquad.tools.engine.counting.counting_configs import COUNTS, reported_figures
    rows = []
    for name in of_family([name for name, theirs in reported_figures().items() if 'gmacs' in theirs], family):
        row, theirs = counted_config(name), reported_figures()[name]
        auxiliary = row.get('parameters_of_auxiliary_head')
        rows.append([f'`{name}`', '{} x {}'.format(*row['size']),
                     f"{row['parameters']:,}" + (f' + {auxiliary:,}' if auxiliary else ''), *_counts(row),
                     _reported(theirs),
                     f"{COUNTS[row['nearest_count']]}: {row['deviation_percent']:+.1f} %"])
    return markdown(['config', 'image size', 'parameters (+ auxiliary head)', *_COUNT_HEADINGS,
                     'reported by the authors', 'nearest count'], rows)


def _evaluations(root: Path, family: str) -> List[Dict[str, Any]]:
    """The newest record of `subquad test --record` for each config and its options."""
    newest = {(line['config'], line['options']): line for line in read_records(root / RECORDS / 'trained.jsonl')
              if of_family([line['config']], family)}
    return [line for _, line in sorted(newest.items())]


def trained_table(root: Path, family: str) -> str:
    """Accuracies of the classifiers that were trained with this package."""
    rows = [[f"`{line['config']}`", line['options'] or '-', f"{line['accuracy/top1']:.1f} %"]
            for line in _evaluations(root, family) if 'accuracy/top1' in line]
    return markdown(['config', 'options', 'top-1 on the test part'], rows)


def shapes_table(root: Path, family: str) -> str:
    """Results of the detectors and segmenters that were trained with this package on generated images."""
    measures = (('coco/bbox_mAP_50', 'box AP50', 100), ('coco/segm_mAP_50', 'mask AP50', 100), ('mIoU', 'mIoU', 1))
    rows = [[f"`{line['config']}`", line['options'].removeprefix('experiment_name=').replace('_', ' ') or 'full',
             *(f'{line[key] * scale:.1f}' if key in line else '-' for key, _, scale in measures)]
            for line in _evaluations(root, family) if 'accuracy/top1' not in line]
    return markdown(['config', 'training', *(f'{name}, %' for _, name, _ in measures)], rows)
