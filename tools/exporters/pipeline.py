"""Write a file, run it, compare it with the ordinary model, move it to its place, and report on it."""
import copy
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from rich.table import Table
from torch import Tensor

from ..common.cli import UserError, one_line, shown
from ..common.output import add_row, print_table
from ..common.paths import writable_folder
from .formats import FORMATS, Conversion, Options, check_options, exporter
from .subject import Subject, described

# Largest relative error that passes. With 8 bits and less, it only finds wrong files: the accuracy on images decides.
TOLERANCES = {'fp32': 1e-4, 'fp16': 1e-2, 'int8': 1.0, 'dynamic8': 1.0, 'palette6': 1.0, 'palette4': 1.0}
# Largest share of pixels with another label, per unit of the relative error that passes: 0.1 % for fp32, 10 % for fp16.
_UNEQUAL = 10
# With fewer calibration images, a note asks for more.
FEW = 16
# Which file to take instead: (format, precision) -> sentence. Measured on x86; `.ort` lacks the blocked layout there.
_ADVICE = {
    ('onnx', 'fp16'): 'on x86, ONNX Runtime computes fp16 slower than fp32; fp16 is for GPUs and smaller files',
    **{('ort', precision): 'ONNX Runtime cannot optimize an .ort file for the processor, so an .onnx file is faster '
       'where a full ONNX Runtime fits' for precision in ('fp32', 'fp16', 'int8')},
}
Run = Callable[[Tensor], List[Tensor]]
Latency = Dict[int, Tuple[float, float]]


class Errors(NamedTuple):
    """Largest differences over all outputs and inputs.

    Attributes:
        absolute: max|a - b|.
        relative: max|a - b| / max|b|, of the output with the largest quotient.
        output: name of that output.
        unequal: largest share of different elements in an output of integers, such as the labels of a segmenter.
    """
    absolute: float = 0.
    relative: float = 0.
    output: str = ''
    unequal: float = 0.


@dataclass
class Report:
    """The result of one export.

    Attributes:
        format: name of the format.
        path: the file, or the first of several.
        bytes: size of all its files.
        conversion: what the conversion tells.
        errors: differences from the ordinary model; None if the runtime does not run here.
        tolerance: the largest relative error that passes.
        latency: threads -> milliseconds of the file and of the ordinary model.
        notes: sentences for the user.
    """
    format: str
    path: Path
    bytes: int
    conversion: Conversion
    errors: Optional[Errors]
    tolerance: float
    latency: Latency
    notes: List[str]

    @property
    def passed(self) -> bool:
        """False if the error is above the tolerance. Then there is no file."""
        return self.errors is None or (self.errors.relative <= self.tolerance
                                       and self.errors.unequal <= _UNEQUAL * self.tolerance)

    def row(self) -> Dict[str, Any]:
        """Return the report as a dict that JSON can hold."""
        errors = self.errors
        return dict(
            format=self.format, file=str(self.path) if self.passed else None, passed=self.passed, bytes=self.bytes,
            **self.conversion._asdict(), absolute_error=errors and errors.absolute,
            relative_error=errors and errors.relative, output=errors and errors.output,
            unequal_labels=errors and errors.unequal, tolerance=self.tolerance,
            latency_ms={str(threads): dict(file=file, eager=eager) for threads, (file, eager) in self.latency.items()},
            notes=self.notes)


def export(
        subject: Subject,
        name: str,
        path: Path,
        options: Options = Options(),                   # noqa: B008  (a tuple)
        tolerance: Optional[float] = None,
        repeats: int = 20,
) -> Report:
    """Write one format. The file appears only if its outputs are those of the ordinary model.

    Args:
        subject: What to export.
        name: Name of the format.
        path: The file to write; it ends with the suffix of the format. An existing file is replaced.
        options: Precision, dynamic dimensions and calibration images.
        tolerance: Largest relative error that passes (default: `TOLERANCES`).
        repeats: Number of runs for the latency; 0 to skip it.

    Raises:
        UserError: The format is not installed, or does not support an option or the model; or the conversion fails; or
            the folder cannot be written.
    """
    module, tolerance = exporter(name), TOLERANCES[options.precision] if tolerance is None else tolerance
    check_options(name, options)
    _check_dynamic(subject, options)
    subject = with_file_metadata(subject, name, options)
    notes = [f'{_ADVICE[name, options.precision]}.'] if (name, options.precision) in _ADVICE else []
    if 'window' in subject.metadata:
        notes.append(f'{subject.name} is tested with sliding windows; the file computes one window of '
                     f'{" x ".join(map(str, subject.size))} pixels.')
    if (subject.metadata['preprocessing']['resize'] or {}).get('enlarge') is False:
        notes.append(f'the config keeps the size of pictures; the file shrinks those of more than '
                     f'{" x ".join(map(str, subject.size))} pixels, unlike `subquad predict` with the config: choose '
                     '--size for your pictures.')
    folder = Path(tempfile.mkdtemp(dir=writable_folder(str(path.parent)), prefix=f'.{path.name}.'))
    temporary, errors, times = folder / path.name, None, {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')        # converters warn of their own and PyTorch's future versions
            conversion = module.convert(subject, options, temporary)
        if FORMATS[name].runs:
            run = module.load(temporary)
            errors = compare(run, subject, inputs_for(subject, options))
            times, share = _latency(lambda threads: module.load(temporary, threads), subject, repeats)
            if share < 0.9:
                notes.append(f'other programs kept the processor busy for {1 - share:.0%} of the time, so that the '
                             'times are too long.')
            if options.calibration and subject.task == 'classification':
                notes.append(_agreement(name, run, subject, options.calibration))
        else:
            module.check(temporary)
            notes.append(f'{name}: converted, read again and its operators checked. The file was not run, so that no '
                         'output was compared.')
        size = sum(file.stat().st_size for file in folder.rglob('*') if file.is_file())
        report = Report(name, path, size, conversion, errors, tolerance, times, notes)
        if report.passed:
            _move(folder, path)
        return report
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:             # converters raise exceptions of many kinds
        if isinstance(error, OSError) and error.strerror and error.filename is None:      # of a full disk
            raise UserError(f'cannot write {shown(path)} ({error.strerror})') from error
        raise UserError(f'{subject.name} cannot be converted to {name}: {type(error).__name__}: '
                        f'{shown(one_line(error))}') from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_dynamic(subject: Subject, options: Options) -> None:
    """Refuse dynamic dimensions that the model does not have, and an image size that the file would not take."""
    if 'hw' in options.dynamic:
        if isinstance(subject.sizes, str):
            raise UserError(subject.sizes)
        smallest, step, largest = subject.sizes
        if any(side % step or not smallest <= side <= largest for side in subject.size):
            raise UserError(f'with --dynamic hw, the sides of --size must be multiples of {step} from {smallest} to '
                            f'{largest} for {subject.name}, got {"x".join(map(str, subject.size))}')
    if 'batch' in options.dynamic and subject.task == 'detection':
        raise UserError('a detector is exported for one image, so the batch cannot be dynamic')


def with_file_metadata(subject: Subject, name: str, options: Options = Options()) -> Subject:      # noqa: B008  (a tuple)
    """Complete the metadata of a subject by what one file is."""
    metadata = copy.deepcopy(subject.metadata)
    exact = dict(FORMATS[name].exact) if options.precision == 'fp32' else {}
    metadata.update(format=name, precision=options.precision,
                    runtime=dict(name=FORMATS[name].title, options=exact))
    layout, sides = FORMATS[name].layout, dict(zip('NCHW', metadata['input']['shape']))
    metadata['input'].update(layout=layout, shape=[sides[axis] for axis in layout], dynamic=sorted(options.dynamic))
    if 'hw' in options.dynamic:
        metadata['input']['multiple_of'] = subject.sizes.multiple_of
        metadata['input']['smallest'], metadata['input']['largest'] = subject.sizes.smallest, subject.sizes.largest
    if not metadata['outputs']:            # detectors describe what the file adds to the outputs of the graph
        with torch.inference_mode():
            outputs = subject.eager(subject.example())
        metadata['outputs'] = described(subject.outputs, outputs)
    for output in metadata['outputs']:
        if output['dtype'] == 'int64':
            output['dtype'] = FORMATS[name].integers
    return replace(subject, metadata=metadata)


def _move(folder: Path, path: Path) -> None:
    """Move all files of a folder to the folder of `path`; they replace older ones."""
    try:
        for new in sorted(folder.iterdir()):
            old, spare = path.parent / new.name, folder / f'{new.name}.old'
            if old.is_dir() and not old.is_symlink():
                if not (new.is_dir() and (old / 'Manifest.json').is_file()):
                    raise UserError(f'{shown(old)} is a folder that no export has written; it is not replaced')
                os.rename(old, spare)          # a folder cannot be replaced in one step
            try:
                os.replace(new, old)
            except OSError:
                if spare.exists():
                    os.rename(spare, old)
                raise
    except OSError as error:
        raise UserError(f'cannot write {path} ({error.strerror or error})') from error


# ---- comparing the file with the ordinary model

def inputs_for(subject: Subject, options: Options) -> List[Tensor]:
    """Return the images of the comparison: with several batches and sizes where these are dynamic.

    Quantized files are compared on calibration images, unless sizes are dynamic, since noise lies outside the ranges
    that were calibrated.
    """
    if options.precision == 'int8' and 'hw' not in options.dynamic:
        images = list(options.calibration[:8])
        return [images[0], torch.cat(images[:3]), torch.cat(images[:2])] if options.dynamic else images
    batches = (1, 3, 2) if 'batch' in options.dynamic else (1, 1, 1)
    sizes: Sequence[Tuple[int, int]] = [subject.size] * 3
    if 'hw' in options.dynamic:
        step, smallest = subject.sizes.multiple_of, subject.sizes.smallest
        height, width = (max(2 * step, smallest, -(-side // step) * step) for side in subject.size)
        sizes = [(height, width), (height + step, width), (height, width + 2 * step)]
    return [subject.example(batch, size, seed) for seed, (batch, size) in enumerate(zip(batches, sizes))]


def compare(run: Run, subject: Subject, inputs: Sequence[Tensor]) -> Errors:
    """Run the file and the ordinary model on the same images.

    Raises:
        UserError: The number or a shape of the outputs differs, or an output of the ordinary model is not finite.
    """
    worst = Errors(output=subject.outputs[0])
    names = [output['name'] for output in subject.metadata['outputs']] or subject.outputs
    for images in inputs:
        with torch.inference_mode():
            expected = subject.eager(images)
        outputs = run(images)
        if len(outputs) != len(names):
            raise UserError(f"the exported file has {len(outputs)} outputs, the model has {', '.join(names)}")
        by_name = dict(zip(names, outputs))
        for name, b in zip(subject.outputs, expected):
            a = by_name.get(f'raw_{name}', by_name[name])       # before the selection of detections
            if a.shape != b.shape:
                raise UserError(f'the exported file gives {name} of shape {tuple(a.shape)} for images '
                                f'{tuple(images.shape)}, the model {tuple(b.shape)}')
            if not b.is_floating_point():
                worst = worst._replace(unequal=max(worst.unequal, float((a != b).double().mean())))
                continue
            absolute, relative = difference(a, b, name)
            worst = worst._replace(absolute=max(worst.absolute, absolute))
            if relative > worst.relative:
                worst = worst._replace(relative=relative, output=name)
    return worst


def difference(actual: Tensor, expected: Tensor, name: str) -> Tuple[float, float]:
    """Return max|a - b| and max|a - b| / max|b|; infinite if `actual` has values that are not finite.

    Raises:
        UserError: `expected` has values that are not finite.
    """
    actual, expected = actual.double(), expected.double()
    if not expected.isfinite().all():
        raise UserError(f'the output {name} of the ordinary model holds NaN or infinities: nothing can be compared')
    absolute = float((actual - expected).abs().max())
    if not math.isfinite(absolute):
        return math.inf, math.inf
    return absolute, absolute / max(float(expected.abs().max()), 1e-30)


def _agreement(name: str, run: Run, subject: Subject, images: Sequence[Tensor]) -> str:
    """Say for how many images the file and the ordinary model choose the same class."""
    with torch.inference_mode():
        equal = sum(int(run(image)[0].argmax(1) == subject.eager(image)[0].argmax(1)) for image in images)
    return (f'{name}: the file and the ordinary model choose the same class for {equal} of {len(images)} calibration '
            f"images{'; use a hundred images or more.' if len(images) < FEW else '.'}")


def _latency(load: Callable[[int], Run], subject: Subject, repeats: int) -> Tuple[Latency, float]:
    """Measure the file, which `load` opens for a number of threads, and the ordinary model in turn, `repeats` times.

    Returns:
        number of threads (one, and all that this process may use) -> (milliseconds of the file, of the ordinary
        model), medians of the runs on one image; and the share of the time of one thread in which it ran.
    """
    image, before, medians, share = subject.example(), torch.get_num_threads(), {}, 1.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    try:
        for threads in sorted({1, cores}) if repeats else ():
            run, times = load(threads), ([], [])
            torch.set_num_threads(threads)
            with torch.inference_mode():
                for turn in range(repeats + 2):
                    if turn == 2:                        # the first calls fill caches
                        began, worked = time.perf_counter(), time.process_time()
                    for call, taken in zip((run, subject.eager), times):
                        start = time.perf_counter()
                        call(image)
                        if turn >= 2:
                            taken.append(1e3 * (time.perf_counter() - start))
            if threads == 1:
                share = (time.process_time() - worked) / (time.perf_counter() - began)
            medians[threads] = tuple(map(statistics.median, times))
    finally:
        torch.set_num_threads(before)
    return medians, share


# ---- reporting

def print_reports(reports: Sequence[Report]) -> None:
    """Print the reports as a table on stdout; notes and errors above the tolerance go to stderr."""
    threads = sorted({number for report in reports for number in report.latency})
    table = Table('format', 'file', 'MB', 'operators', 'max error', 'relative',
                  *(f"ms, {number} thread{'s' if number > 1 else ''} (eager)" for number in threads))
    for report in reports:
        errors, conversion = report.errors, report.conversion
        operators = str(sum(conversion.operators.values()))
        if conversion.delegated_macs is not None:
            operators += f' + {conversion.delegates} delegates with {conversion.delegated_macs:.0%} of the MACs'
        add_row(
            table,
            report.format,
            str(report.path) if report.passed else 'not written',
            f'{report.bytes / 1e6:.2f}',
            operators,
            'not run' if errors is None else f'{errors.absolute:.1e}',
            '' if errors is None else f'{errors.relative:.1e}',
            *('{:.1f} ({:.1f})'.format(*report.latency[number]) if number in report.latency else ''
              for number in threads),
        )
    if reports:
        print_table(table)
    for report in reports:
        for note in report.notes:
            print(f'note: {note}', file=sys.stderr)
        if not report.passed:
            errors = report.errors
            reason = (f'{errors.unequal:.1%} of the labels differ from those of the ordinary model'
                      if errors.relative <= report.tolerance else
                      f'the relative error {errors.relative:.1e} of {errors.output} is above the tolerance '
                      f'{report.tolerance:g}')
            print(f'error: {report.format}: {reason}, so {report.path} is not written', file=sys.stderr)
