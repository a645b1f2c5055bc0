"""Weight files: safetensors of our own, foreign pickles read without running them, loading that says what does not fit.

Nothing here ever leaves a weight random in silence: a file that does not fit the model raises, naming keys and shapes,
and what may differ is named in a warning.
"""
from .errors import NonFiniteError, WeightsError, shown, some
from .files import read, read_checkpoint, read_metadata, save_state_dict, save_weights, unwrap, written_whole
from .loading import (
    check_finite,
    checkpoint_filter_fn,
    differences,
    fit,
    is_finite,
    load_state_dict,
    load_weights,
    pretrained_filter,
)
from .metadata import check_metadata, check_options, check_transform

__all__ = ['NonFiniteError', 'WeightsError', 'check_finite', 'check_metadata', 'check_options', 'check_transform',
           'checkpoint_filter_fn', 'differences', 'fit', 'is_finite', 'load_state_dict', 'load_weights',
           'pretrained_filter', 'read', 'read_checkpoint', 'read_metadata', 'save_state_dict', 'save_weights',
           'shown', 'some', 'unwrap', 'written_whole']
