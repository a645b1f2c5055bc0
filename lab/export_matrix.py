"""Export models to every format, and record the errors and sizes for the tables of exports.

`python -m lab.export_matrix` exports a classifier of each family with random weights and randomized norms, in fp32
with static sizes also as feature pyramid, and the detector and the segmenters of the shapes with their weights. Formats
whose packages are not installed keep their records, so that LiteRT can be recorded in an environment of its own. The
files are removed.
"""
import argparse
import datetime
import json
import sys
import tempfile
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Sequence

import torch
from torch import nn

from subquad.tools.common.cli import UserError
from subquad.tools.exporters.formats import FORMATS, PRECISIONS, WITH_NMS, Options, missing_packages
from subquad.tools.exporters.pipeline import TOLERANCES, export
from subquad.tools.exporters.subject import Subject, classifier_subject, random_classifier

from .documents import RECORDS, ROOT, markdown

FILE = 'exports.json'
MODELS = ('subquad_mobilevitv2_050', 'test_ppma', 'test_myo', 'test_lcsm', 'test_rmt', 'test_mlla', 'test_vmamba',
          'test_vim', 'test_mambavision')
# Weights of detectors and segmenters, and their configs.
DENSE = {'test_mobilevitv2.ssdlite_shapes': 'ssdlite_test-mobilevitv2_shapes',
         'test_mobilevitv2.deeplabv3_shapes': 'deeplabv3_test-mobilevitv2_shapes',
         'test_ppma.upernet_shapes': 'upernet_test-ppma_shapes'}
DISTRIBUTIONS = {'onnx': 'onnxruntime', 'ort': 'onnxruntime', 'openvino': 'openvino', 'pt2': 'torch',
                 'aoti': 'torch', 'executorch': 'executorch', 'litert': 'litert-torch', 'ncnn': 'ncnn',
                 'coreml': 'coremltools'}
# Precision and dynamic dimensions of each column; a format has the cells that it supports.
VARIANTS = (('fp32', frozenset()), ('fp32', frozenset({'batch'})), ('fp32', frozenset({'hw'})),
            *((precision, frozenset()) for precision in PRECISIONS[1:]))
CALIBRATION = 16            # random images


_DYNAMIC = {'batch': 'dynamic batch', 'hw': 'dynamic height and width'}


class Cell(NamedTuple):
    """One export of the matrix; `task` is 'classification', 'features' or 'dense'."""
    model: str
    task: str
    format: str
    precision: str
    dynamic: FrozenSet[str]

    @property
    def key(self) -> str:
        """The name of its record."""
        return ' '.join([self.model, self.task, self.format, self.precision, *sorted(self.dynamic)])


def cells() -> Iterator[Cell]:
    """All exports of the matrix."""
    subjects = [*product(MODELS, ('classification', 'features')), *product(DENSE, ('dense',))]
    for (model, task), name, (precision, dynamic) in product(subjects, FORMATS, VARIANTS):
        form = FORMATS[name]
        only_fp32 = task == 'features' and (precision != 'fp32' or dynamic) or task == 'dense' and dynamic
        if precision in form.precisions and dynamic <= set(form.dynamic) and not only_fp32:
            yield Cell(model, task, name, precision, dynamic)


def randomize_norms(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill the weights, biases and statistics of all norms with random numbers, so that none is an identity."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(x: torch.Tensor, low: float, high: float) -> None:
        x.copy_(low + (high - low) * torch.rand(x.shape, generator=generator))

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)):
                uniform(module.weight, 0.5, 1.5)
                uniform(module.bias, -0.5, 0.5)
            if isinstance(module, nn.BatchNorm2d):
                uniform(module.running_mean, -0.5, 0.5)
                uniform(module.running_var, 0.5, 1.5)
    return model


def record(cell: Cell, folder: Path) -> Dict[str, Any]:
    """Export one cell into a folder, and return its record; an export that fails has an entry `error`."""
    known = dict(model=cell.model, task=cell.task, format=cell.format,
                 precision=cell.precision, dynamic=sorted(cell.dynamic), tolerance=TOLERANCES[cell.precision],
                 runtime=f'{DISTRIBUTIONS[cell.format]} {version(DISTRIBUTIONS[cell.format])}',
                 torch=torch.__version__, date=str(datetime.date.today()))
    try:
        subject = _subject(cell)
        images = [subject.example(seed=seed) for seed in range(CALIBRATION)] if cell.precision == 'int8' else ()
        report = export(subject, cell.format, folder / f'model{FORMATS[cell.format].suffix}',
                        Options(cell.precision, cell.dynamic, images), repeats=0)
    except UserError as error:
        return dict(known, error=str(error))
    return dict(known, bytes=report.bytes, operators=sum(report.conversion.operators.values()),
                delegates=report.conversion.delegates, delegated_macs=report.conversion.delegated_macs,
                relative_error=report.errors and report.errors.relative, passed=report.passed)


def _subject(cell: Cell) -> Subject:
    if cell.task == 'dense':
        from subquad.tools.engine.config import load
        from subquad.tools.exporters.dense_subject import dense_subject
        return dense_subject(load(DENSE[cell.model]), cell.model, (128, 128), nms=cell.format in WITH_NMS,
                             labels=cell.format != 'ncnn')
    torch.manual_seed(0)
    read = random_classifier(cell.model)
    randomize_norms(read.model)
    return classifier_subject(read, 'random', features=cell.task == 'features')


def exports_table(root: Path) -> str:
    """The largest relative errors of exported classifiers: a row for each kind of file, a column for each model."""
    return _errors(root, MODELS, ('classification', 'features'))


def dense_exports_table(root: Path) -> str:
    """The largest relative errors of exported detectors and segmenters, as `exports_table` has those of classifiers."""
    return _errors(root, DENSE, ('dense',))


def _errors(root: Path, models: Iterable[str], tasks: Sequence[str]) -> str:
    records = _records(root)
    kinds = dict.fromkeys(cell[1:] for cell in cells() if cell.task in tasks)
    rows = [[_described(*kind), *(_shown(records.get(Cell(model, *kind).key)) for model in models)]
            for kind in sorted(kinds, key=lambda kind: list(FORMATS).index(kind[1]))]
    return markdown(['file', *(f'`{model}`' for model in models)], rows)


def _described(task: str, name: str, precision: str, dynamic: FrozenSet[str]) -> str:
    words = [*([] if precision == 'fp32' else [precision]), *(['feature maps'] if task == 'features' else []),
             *(_DYNAMIC[axis] for axis in sorted(dynamic))]
    return ', '.join([f'`{name}`', *words])


def exports_summary_table(root: Path) -> str:
    """Size and error of one model in each format."""
    rows = []
    for name, form in FORMATS.items():
        entry = _records(root).get(Cell(MODELS[0], 'classification', name, 'fp32', frozenset()).key)
        size = f"{entry['bytes'] / 1e6:.2f}" if entry and 'bytes' in entry else '-'
        rows.append([f'`{name}`', form.title, size, _shown(entry)])
    return markdown(['format', 'runtime', 'MB', 'largest relative error'], rows)


def _records(root: Path) -> Dict[str, Dict[str, Any]]:
    path = root / RECORDS / FILE
    if not path.exists():
        raise UserError(f'there is no {path}; python -m lab.export_matrix writes it')
    return json.loads(path.read_text())


def formats_table(root: Path) -> str:
    """The formats with their files, precisions and dynamic dimensions."""
    rows = [[f'`{name}`', form.title, f'`{form.suffix}`', ', '.join(form.precisions),
             ', '.join(form.dynamic) or 'none',
             f"`{'onnx' if name == 'ort' else name}`" if form.distributions else 'none']
            for name, form in FORMATS.items()]
    return markdown(['format', 'runtime', 'file', 'precisions', 'dynamic', 'extra'], rows)


def _shown(entry: Optional[Dict[str, Any]]) -> str:
    if entry is None:
        return 'not measured'
    if 'error' in entry:
        return 'refused'
    if entry['relative_error'] is None:
        return 'converted'
    return f"{entry['relative_error']:.0e}" + ('' if entry['passed'] else ' (too large)')


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    parser = argparse.ArgumentParser('python -m lab.export_matrix', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('words', nargs='*', help='record only the cells whose key has all of these words')
    args = parser.parse_args(argv)
    path = ROOT / RECORDS / FILE
    records = json.loads(path.read_text()) if path.exists() else {}
    kept, failed = {cell.key for cell in cells()}, 0
    for cell in cells():
        if missing_packages(cell.format) or not set(args.words) <= set(cell.key.split()):
            continue
        with tempfile.TemporaryDirectory() as folder:
            entry = record(cell, Path(folder))
        failed += not entry.get('passed', False)
        print(cell.key, entry.get('error') or entry['relative_error'], file=sys.stderr, flush=True)
        records[cell.key] = entry
        kept_records = {key: entry for key, entry in records.items() if key in kept}
        path.write_text(json.dumps(kept_records, indent=1, sort_keys=True) + '\n')
    return int(failed > 0)


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
