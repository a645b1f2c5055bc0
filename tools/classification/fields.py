"""Random fields with a power-law spectrum, clean and with noise on top: what a denoiser with long range is good at."""
from typing import Sequence, Tuple, Union

import numpy as np

Seed = Union[int, Sequence[int]]


def random_fields(count: int, height: int, width: int, exponent: float = 2., seed: Seed = 0) -> np.ndarray:
    """Gaussian random fields whose power falls with the frequency f as 1 / f^exponent; photographs have about 2.

    White noise is filtered in Fourier space by f^(-exponent / 2), where f^2 = fy^2 + fx^2 in cycles per pixel, so a
    field goes on from each side at the opposite one. Each by itself is then brought to mean 0 and variance 1.

    Args:
        count: how many.
        seed: anything numpy.random.default_rng takes.

    Returns:
        float32 (count, height, width).

    Raises:
        ValueError: count < 1, or fewer than two pixels.
    """
    if count < 1 or min(height, width) < 1 or height * width < 2:
        raise ValueError(f'count, height and width must be at least 1, and two pixels, got {count}, {height}, {width}')
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf                                            # the mean: gone
    fields = np.empty((count, height, width), np.float32)
    rng = np.random.default_rng(seed)
    for field in fields:                                                # one at a time: an eighth of the memory
        spectrum = np.fft.rfft2(rng.standard_normal((height, width))) * frequency ** (-exponent / 2)
        values = np.fft.irfft2(spectrum, (height, width))
        values -= values.mean()
        field[...] = values / values.std()
    return fields


def noisy_fields(count: int, height: int, width: int, noise: float = 1., exponent: float = 2.,
                 seed: Seed = 0) -> Tuple[np.ndarray, np.ndarray]:
    """Fields with white Gaussian noise of this standard deviation on them, and the clean ones: (noisy, clean).

    clean equals random_fields with the same arguments. Both are float32 (count, height, width).

    Raises:
        ValueError: as random_fields; or a negative noise.
    """
    if noise < 0:
        raise ValueError(f'noise must not be negative, got {noise}')
    clean = random_fields(count, height, width, exponent, seed)
    entropy = [seed] if isinstance(seed, (int, np.integer)) else list(seed)
    rng = np.random.default_rng([*entropy, 1])                          # not the noise that the fields are made of
    return clean + np.float32(noise) * rng.standard_normal(clean.shape, np.float32), clean
