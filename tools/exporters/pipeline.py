"""Convert a subject, run the file, compare it with the ordinary model, and move it to its place."""
import copy
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from ..common.cli import UserError, one_line, shown
from ..common.paths import writable_folder
from .comparing import Errors, agreement, compare, inputs_for, latency
from .formats import FORMATS, Conversion, Options, check_options, exporter
from .subject import Subject

# Largest relative error that passes. That of int8 only finds files that are wrong: the accuracy on images decides.
TOLERANCES = {'fp32': 1e-4, 'fp16': 1e-2, 'int8': 1.0}
# Largest share of pixels with another label, per unit of the relative error that passes: 0.1 % for fp32, 10 % for fp16.
_UNEQUAL = 10
# With fewer calibration images, a note asks for more.
FEW = 16


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
    latency: Dict[int, Tuple[float, float]]
    notes: List[str]

    @property
    def passed(self) -> bool:
        """False if the error is above the tolerance. Then there is no file."""
        return self.errors is None or (self.errors.relative <= self.tolerance
                                       and self.errors.unequal <= _UNEQUAL * self.tolerance)


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
        UserError: The format is unknown, not installed, or does not support an option or the model; or the conversion
            fails; or the folder cannot be written.
    """
    module, tolerance = exporter(name), TOLERANCES[options.precision] if tolerance is None else tolerance
    check_options(name, options)
    if options.precision == 'int8' and not options.calibration:
        raise UserError('int8 needs calibration images, which show the ranges of the values')
    if 'hw' in options.dynamic and isinstance(subject.sizes, str):
        raise UserError(subject.sizes)
    if 'hw' in options.dynamic:
        _check_size(subject)
    if 'batch' in options.dynamic and subject.task == 'detection':
        raise UserError('a detector is exported for one image, so the batch cannot be dynamic')
    subject = _with_file_metadata(subject, name, options)
    folder = Path(tempfile.mkdtemp(dir=writable_folder(str(path.parent)), prefix=f'.{path.name}.'))
    try:
        temporary = folder / path.name
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')        # converters warn of their own and PyTorch's future versions
                conversion = module.convert(subject, options, temporary)
            errors = times = None
            notes = [*_limits(subject), *conversion.notes]
            if FORMATS[name].runs:
                errors = compare(module.load(temporary), subject, inputs_for(subject, options))
                times = latency(lambda threads: module.load(temporary, threads), subject, repeats)
                if options.calibration and subject.task == 'classification':
                    equal = agreement(module.load(temporary), subject, options.calibration)
                    notes.append(f'{name}: the file and the ordinary model choose the same class for {equal} of '
                                 f'{len(options.calibration)} calibration images'
                                 + ('; use a hundred images or more.' if len(options.calibration) < FEW else '.'))
            else:
                module.check(temporary)
                notes.append(f'{name}: converted, read again and its operators checked. The file was not run, so that '
                             'no output was compared.')
        except (UserError, KeyboardInterrupt):
            raise
        except Exception as error:             # converters raise exceptions of many kinds
            if isinstance(error, OSError) and error.strerror and error.filename is None:      # of a full disk
                raise UserError(f'cannot write {shown(path)} ({error.strerror})') from error
            raise UserError(f'{subject.name} cannot be converted to {name}: {type(error).__name__}: '
                            f'{shown(one_line(error))}') from error
        size = sum(file.stat().st_size for file in folder.rglob('*') if file.is_file())
        report = Report(name, path, size, conversion, errors, tolerance, times or {}, notes)
        if report.passed:
            _move(folder, path)
        return report
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_size(subject: Subject) -> None:
    """Refuse an image size that a file with dynamic height and width would not take."""
    smallest, step, largest = subject.sizes
    if any(side % step or not smallest <= side <= largest for side in subject.size):
        raise UserError(f'with --dynamic hw, the sides of --size must be multiples of {step} from {smallest} to '
                        f'{largest} for {subject.name}, got {"x".join(map(str, subject.size))}')


def _limits(subject: Subject) -> List[str]:
    """Say what the file does not do, and the ordinary model does."""
    if 'window' in subject.metadata:
        return [f'{subject.name} is tested with sliding windows; the file computes one window of '
                f'{" x ".join(map(str, subject.size))} pixels.']
    return []


def _with_file_metadata(subject: Subject, name: str, options: Options) -> Subject:
    """Complete the metadata of a subject by what one file is."""
    import torch
    metadata = copy.deepcopy(subject.metadata)
    metadata.update(format=name, precision=options.precision)
    metadata['input']['dynamic'] = sorted(options.dynamic)
    if 'hw' in options.dynamic:
        metadata['input']['multiple_of'] = subject.sizes.multiple_of
        metadata['input']['smallest'], metadata['input']['largest'] = subject.sizes.smallest, subject.sizes.largest
    if not metadata['outputs']:            # detectors describe what the file adds to the outputs of the graph
        with torch.inference_mode():
            outputs = subject.eager(subject.example())
        metadata['outputs'] = [dict(name=output, shape=list(value.shape))
                               for output, value in zip(subject.outputs, outputs)]
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

