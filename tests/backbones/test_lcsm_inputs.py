"""Test the errors of LCSM's mixer and sequence model for wrong inputs: what came, and what is allowed."""
import re

import pytest
import timm
import torch

from subquad.backbones.mixers import EosMixer
from subquad.backbones.mixers.eos_codes import OSCILLATIONS, parse


def sequence_models():
    return [timm.create_model('lcsm_sequence', num_classes=20, dim=8, num_heads=2),
            timm.create_model('myo_sequence', vocab_size=20, dim=16, depth=1, num_heads=2)]


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int8, torch.int16, torch.bool, torch.float32, torch.float16],
                         ids=str)
def test_tokens_of_another_dtype_are_refused(dtype):
    for model in sequence_models():
        with pytest.raises(ValueError, match=rf'\(B, T\) of int32 or int64 .* got {dtype} of shape \(2, 5\)'):
            model(torch.zeros(2, 5, dtype=dtype))


@pytest.mark.parametrize('shape', [(5,), (2, 5, 1), (2, 0)])
def test_tokens_of_another_shape_are_refused(shape):
    for model in sequence_models():
        with pytest.raises(ValueError, match=f'T >= 1, got torch.int64 of shape {re.escape(str(shape))}'):
            model(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64], ids=str)
def test_tokens_out_of_range_are_refused(dtype):
    for model in sequence_models():
        for wrong in (20, -1, 1000):
            with pytest.raises(ValueError, match=f'tokens must be from 0 to 19, got {wrong}$'):
                model(torch.tensor([[0, wrong, 19]], dtype=dtype))
        assert len(model(torch.tensor([[0, 19, 3]], dtype=dtype))) == 1
    assert sequence_models()[0](torch.zeros(0, 5, dtype=dtype)).shape == (0, 5, 20)
    with pytest.raises(ValueError, match='with T >= 1, got list'):
        sequence_models()[0]([[1, 2]])


@pytest.mark.parametrize('mode', ['axis', 'raster', 'forward'])
@pytest.mark.parametrize('shape', [(2, 5, 32), (2, 5, 4, 31), (32,), (2, 3, 5, 4, 32), (2, 32, 5, 4), (2, 0, 5, 32),
                                   (2, 5, 0, 32)])
def test_mixer_names_the_shape_of_a_wrong_input(mode, shape):
    with pytest.raises(ValueError, match=re.escape(f'x must be (B, H, W, 32) with H and W >= 1, got {shape}')):
        EosMixer(32, 2, mode=mode)(torch.zeros(shape))


@pytest.mark.parametrize('dim, heads, message', [
    (30, 4, 'dim must be a multiple of num_heads, got dim=30 and num_heads=4'),
    (0, 1, 'dim must be an integer from 1 to 65536, got 0'), (-32, 2, 'dim must be an integer from 1 .* got -32'),
    (32.0, 2, r'dim must be an integer from 1 .* got 32\.0'), (32, 0, 'num_heads must be an integer from 1 .* got 0'),
    (32, -2, 'num_heads must be .* got -2'), (32, '2', "num_heads must be .* got '2'"),
    (32, True, 'num_heads must be .* got True')])
def test_mixer_refuses_sizes_that_do_not_fit(dim, heads, message):
    with pytest.raises(ValueError, match=message):
        EosMixer(dim, heads)


def test_numberings_differ_in_four_oscillations():
    """What the documentation of `numbering` says."""
    for number in OSCILLATIONS:
        code, other = (parse(f'1-{number}-1-0', numbering) for numbering in ('code', 'paper'))
        assert (code != other) == (number in (2, 3, 4, 5))
    assert parse('0-1-0-1-0', 'paper') == parse('0-1-0-1-0')
