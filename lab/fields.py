"""Random fields with a power-law spectrum, like those of photographs."""
from typing import Sequence, Union

import numpy as np

Seed = Union[int, Sequence[int]]


def random_fields(count: int, height: int, width: int, exponent: float = 2., seed: Seed = 0) -> np.ndarray:
    """Generate Gaussian random fields whose power falls with the frequency f as 1 / f^exponent.

    White noise is filtered in Fourier space by f^(-exponent / 2), where f^2 = fy^2 + fx^2 in cycles per pixel, so
    fields are periodic. Each field is then normalized to mean 0 and variance 1.

    Args:
        count: number of fields.
        height, width: size of a field in pixels.
        exponent: decay of the power; photographs have an exponent of about 2.
        seed: any seed that numpy.random.default_rng accepts.

    Returns:
        float32 (count, height, width).
    """
    if count < 1 or min(height, width) < 1 or height * width < 2:
        raise ValueError(f'count, height and width must be at least 1, and two pixels, got {count}, {height}, {width}')
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf                                            # removes the mean
    fields = np.empty((count, height, width), np.float32)
    rng = np.random.default_rng(seed)
    for field in fields:                                                # one at a time takes an eighth of the memory
        spectrum = np.fft.rfft2(rng.standard_normal((height, width))) * frequency ** (-exponent / 2)
        values = np.fft.irfft2(spectrum, (height, width))
        values -= values.mean()
        field[...] = values / values.std()
    return fields
