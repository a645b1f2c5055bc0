"""Read, check, load and write weight files.

The package writes safetensors. It reads pickles of other programs with torch's restricted unpickler, so that no code
in them runs. Loading never leaves a weight random without saying so: a file that does not match the model raises
`WeightsError`, which names the keys and shapes, and a warning names each difference that is allowed.
"""
from .errors import NonFiniteError, WeightsError, shorten_path, some
from .files import (
    check_choice,
    read_checkpoint,
    read_file,
    read_metadata,
    save_state_dict,
    save_weights,
    unwrap,
    write_atomically,
)
from .loading import (
    check_finite,
    checkpoint_filter_fn,
    differences,
    is_finite,
    load_state_dict,
    load_weights,
    match_to_model,
    pretrained_filter,
)
from .metadata import check_metadata, check_options, check_transform

__all__ = [
    'NonFiniteError', 'WeightsError', 'check_choice', 'check_finite', 'check_metadata', 'check_options',
    'check_transform', 'checkpoint_filter_fn', 'differences', 'is_finite', 'load_state_dict', 'load_weights',
    'match_to_model', 'pretrained_filter', 'read_checkpoint', 'read_file', 'read_metadata', 'save_state_dict',
    'save_weights', 'shorten_path', 'some', 'unwrap', 'write_atomically',
]
