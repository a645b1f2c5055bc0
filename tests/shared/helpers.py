"""Helpers that tests of several folders share."""
from pathlib import Path

from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / 'tests' / 'data'


def relative_error(actual: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Return the largest absolute difference over the largest absolute expected value, or over `least` if larger."""
    actual, expected = (x.detach().cpu() for x in (actual, expected))
    if not expected.is_complex():
        actual, expected = actual.double(), expected.double()
    scale = expected.abs().max().clamp(min=least) if expected.numel() else 1.0
    return float((actual - expected).abs().max() / scale) if expected.numel() else 0.0


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5, name: str = '') -> None:
    """Assert equal shapes, finite values, and a `relative_error` of at most `tolerance`."""
    assert actual.shape == expected.shape, f'{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}'
    assert actual.isfinite().all(), f'{name}: not finite'
    error = relative_error(actual, expected)
    assert error <= tolerance, f'{name}: relative error {error:.1e}, allowed {tolerance:.1e}'


def listops_text(tokens):
    """Convert tokens of ListOps to text such as '[MAX 2 9 [MIN 4 7 ] 0 ]', without padding and end token."""
    from subquad.tools.data.listops import EOS, PAD, VOCABULARY
    return ' '.join(VOCABULARY[token] for token in tokens if token not in (PAD, EOS))
