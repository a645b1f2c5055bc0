"""Compare an exported file with the ordinary model: errors of every output, and latency side by side."""
import math
import os
import statistics
import time
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from ..common.cli import UserError
from .formats import Options
from .subject import Subject

Run = Callable[[Tensor], List[Tensor]]


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
    for images in inputs:
        with torch.inference_mode():
            expected = subject.eager(images)
        actual = run(images)
        if len(actual) != len(expected):
            raise UserError(f'the exported file has {len(actual)} outputs, the model has {len(expected)}')
        for name, a, b in zip(subject.outputs, actual, expected):
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
    if not expected.numel():
        return 0., 0.
    absolute = float((actual - expected).abs().max())
    if not math.isfinite(absolute):
        return math.inf, math.inf
    return absolute, absolute / max(float(expected.abs().max()), 1e-30)


def agreement(run: Run, subject: Subject, images: Sequence[Tensor]) -> int:
    """Return for how many images the file and the ordinary model choose the same class."""
    with torch.inference_mode():
        return sum(int(run(image)[0].argmax(1) == subject.eager(image)[0].argmax(1)) for image in images)


def thread_counts() -> List[int]:
    """Return the numbers of threads to measure with: one, and all that this process may use."""
    return sorted({1, len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1})


def latency(load: Callable[[int], Run], subject: Subject, repeats: int) -> Dict[int, Tuple[float, float]]:
    """Measure the file and the ordinary model in turn.

    Args:
        load: Returns the function that runs the file with a number of threads.
        subject: The exported model.
        repeats: Number of runs of each.

    Returns:
        number of threads -> (milliseconds of the file, of the ordinary model), medians of the runs on one image.
    """
    image, before = subject.example(), torch.get_num_threads()
    times = {}
    try:
        for threads in thread_counts() if repeats else ():
            run = load(threads)
            torch.set_num_threads(threads)
            times[threads] = _medians([lambda run=run: run(image), lambda: subject.eager(image)], repeats)
    finally:
        torch.set_num_threads(before)
    return times


def _medians(contestants: Sequence[Callable[[], object]], repeats: int) -> Tuple[float, ...]:
    """Call each contestant in turn, and return the medians of their times in milliseconds."""
    times: List[List[float]] = [[] for _ in contestants]
    with torch.inference_mode():
        for turn in range(repeats + 2):
            for contestant, taken in zip(contestants, times):
                start = time.perf_counter()
                contestant()
                if turn >= 2:                    # the first calls fill caches
                    taken.append(1e3 * (time.perf_counter() - start))
    return tuple(map(statistics.median, times))
