"""Convert weight files between the published formats and this package's safetensors, in both directions.

A conversion is strict at both ends: every weight of the model must be in the file with its shape, the file must have
nothing else, and every weight must have a name in the format that is written.
"""
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from . import mambavision_keys, mlla_keys, mobilevitv2_keys, ppma_keys, rmt_keys, vim_keys, vmamba_keys
from .cache import sha256_of
from .errors import NonFiniteError, PathLike, WeightsError, shorten_path, some
from .files import AVERAGED_KEYS, RAW_KEYS, WeightFile, read_file, save_state_dict, write_atomically
from .loading import check_finite, checkpoint_filter_fn, match_to_model
from .metadata import dataset_classes

# Raise this number when a change of the key tables changes what a conversion writes.
KEY_MAP_VERSION = 1
_Weights = Dict[str, Any]


class Format(NamedTuple):
    """The names of one publisher.

    Attributes:
        family: the class of the networks that have these names; '' for all networks.
        suffix: the suffix of the files that are written; '' if this format is only read.
        is_theirs: whether the keys of a network are these names.
        buffers: the ends of keys that have no key of their own here, because this package computes their values, or
            joins them with those of another key.
    """
    family: str
    suffix: str
    is_theirs: Callable[[_Weights], bool] = lambda weights: False
    buffers: Tuple[str, ...] = ()


# The first format whose `is_theirs` is true is the format of a file.
FORMATS: Dict[str, Format] = {
    'subquad': Format('', '.safetensors'),
    'rmt': Format('RMT', '.pth', rmt_keys.is_published, ('.Relpos.angle', '.Relpos.decay')),
    'mlla': Format('MLLA', '.pth', mlla_keys.is_published, (mlla_keys.ROTATIONS,)),
    'mambavision': Format('MambaVision', '.pth', mambavision_keys.is_published, ('.mixer.conv1d_z.weight',)),
    'vim': Format('Vim', '.pth', vim_keys.is_published),
    'vmamba': Format('VMamba', '.pth', vmamba_keys.is_published),
    'ppma': Format('PPMA', '.pth', ppma_keys.is_published, ('.Relpos.angle',)),
    'transformers': Format('MobileViTv2', '', mobilevitv2_keys.is_transformers),
    'cvnets': Format('MobileViTv2', '.pt', mobilevitv2_keys.is_cvnets),
    'timm': Format('MobileViTv2', '.safetensors'),
}
WRITTEN = tuple(name for name, form in FORMATS.items() if form.suffix)
_PICKLES = ('.pth', '.pt', '.bin')
RGB_NOTE = ('its weights are taken as those of RGB images, as in the files of the authors, from which transformers '
            "copied them; transformers' image processor reverses the channels")


class Conversion(NamedTuple):
    """What a conversion has written.

    Attributes:
        path: the new file.
        weights: name -> tensor, as written.
        metadata: the metadata of the new file, with the entry `provenance`.
        notes: a sentence for each thing that the file does not say by itself: which weights were taken, what was left
            out, values that are NaN or infinite.
    """
    path: Path
    weights: Dict[str, Tensor]
    metadata: Dict[str, Any]
    notes: List[str]


def convert(path: PathLike, out: PathLike, model: nn.Module, to: str = 'subquad', weights: Optional[str] = None,
            metadata: Optional[Dict[str, Any]] = None, reference: Optional[PathLike] = None,
            content: Optional[WeightFile] = None) -> Conversion:
    """Convert a weight file.

    Args:
        path: a file of a family's authors, of cvnets, timm, transformers or this package, or a checkpoint of a Runner.
        out: the file to write. It is replaced atomically. With the suffix .pth, .pt or .bin it is a file of
            `torch.save` as the authors write it, with .safetensors it has the authors' names.
        model: the model of the weights: a timm model, or a detector or segmenter. It may be on the meta device.
        to: the format: 'subquad'; the name of a family for the names of its authors; 'cvnets' or 'timm' for
            MobileViTv2.
        weights: 'averaged' or 'raw' for a file that has both; see `read_file`.
        metadata: metadata of the new file, such as the model's name; other entries of the old file's are kept.
        reference: weights of the same MobileViTv2 for RGB images, to settle the color order of a file of transformers
            by its first convolution.
        content: what `read_file` returned, if the file has been read.

    Raises:
        ValueError: the format is unknown, or `out` has another suffix than its format allows.
        WeightsError: the file cannot be read, does not match the model, or has a weight that the format cannot name.
        OSError: `out` cannot be written.
    """
    _check_format(model, to, Path(out))
    content = content or read_file(path, weights)
    name = shorten_path(path)
    notes = [f'{name}: {content.choice}'] if content.choice else []
    source_format = published_format(content.weights)
    if hasattr(model, 'backbone'):
        state, more = _match_dense(content, model, name)
    else:
        state, more = match_to_model(content.weights, model, name)
        _check_spare(content.weights, model, state, name)
        # The file may lack counters, which are then the model's and have no values on the meta device.
        state = {key: torch.zeros((), dtype=value.dtype) if value.is_meta else value for key, value in state.items()}
    notes += [f'{name}: {note}' for note in more]
    if source_format == 'transformers':
        state, note = _settle_colors(state, reference)
        notes.append(f'{name}: {note}')
    try:
        check_finite(state, name)
    except NonFiniteError as error:
        notes.append(f'warning: {error}')
    written = {**content.metadata, **(metadata or {}), 'provenance': _provenance(
        Path(path), content, source_format, notes)}
    state = _published(state, model, to)
    _write(state, Path(out), to, hasattr(model, 'backbone'), written)
    return Conversion(Path(out), state, written, notes)


def published_format(weights: Dict[str, Any]) -> str:
    """Return whose names the keys are: a key of `FORMATS`, 'subquad' for unknown names."""
    backbone = {key.removeprefix('backbone.'): value for key, value in weights.items()}
    return next((name for name, form in FORMATS.items() if form.is_theirs(backbone)), 'subquad')


def _check_format(model: nn.Module, to: str, out: Path) -> None:
    """Check that the model has the format, and that the file has one of its suffixes."""
    if to not in WRITTEN:
        raise ValueError(f"to must be one of {', '.join(map(repr, WRITTEN))}, got {to!r}")
    family, suffix = FORMATS[to].family, FORMATS[to].suffix
    net = getattr(model, 'backbone', model)
    if family and family not in [base.__name__ for base in type(net).__mro__]:
        raise ValueError(f'the format {to!r} is for {family}, and the model is {type(net).__name__}')
    if to == 'timm' and hasattr(model, 'backbone'):
        raise ValueError("timm has no detectors and segmenters; use to='cvnets' for the names of the authors' library")
    allowed = {'.safetensors', *(_PICKLES if suffix in _PICKLES else ())}
    if out.suffix not in allowed:
        raise ValueError(f"{shorten_path(out)} must end in {' or '.join(sorted(allowed))} for the format {to!r}")


def _check_spare(weights: Dict[str, Tensor], model: nn.Module, state: Dict[str, Tensor], name: str) -> None:
    """Check that the model takes every weight of a file, also those that loading may leave out."""
    given = checkpoint_filter_fn(weights, model)
    spare = [key for key in given if key not in state]
    buffers = FORMATS[published_format(weights)].buffers
    lost = len(spare) + len(weights) - len(given) - sum(key.endswith(buffers) for key in weights)
    if lost:
        names = f' ({some(spare)})' if spare else ''
        raise WeightsError(f'{name} has {lost} weights that this {type(model).__name__} does not have{names}; a '
                           'detector or segmenter is converted with its config')


def _match_dense(content: WeightFile, model: nn.Module, name: str) -> Tuple[Dict[str, Tensor], List[str]]:
    """Return the weights of a detector or segmenter under the model's keys, and notes."""
    from ..mm.checkpoints import compare_weights
    from ..mm.published_keys import unused_classes_note
    found = compare_weights(model, content.weights)
    problems = [*found.problems]
    if found.unused:
        problems.append(f'{len(found.unused)} keys not in the model ({some(found.unused)})')
    classes = dataset_classes(content.runner_meta)
    if found.classes_left_out and len(classes) > len(model.decode_head.conv_seg.weight):
        problems.append(f'it was trained on {len(classes)} classes ({some(classes)})')
    if problems:
        raise WeightsError(f"{name} is not a checkpoint of this {type(model).__name__} on "
                           f"{type(model.backbone).__name__}: {'; '.join(problems)}")
    notes = [unused_classes_note('the file')] if found.classes_left_out else []
    if found.new:
        notes.append(f'it has no auxiliary head, and the new file has none ({some(found.new)})')
    return found.weights, notes


def _settle_colors(state: Dict[str, Tensor], reference: Optional[PathLike]) -> Tuple[Dict[str, Tensor], str]:
    """Return weights for RGB images, and say how the color order was found."""
    if reference is None:
        return state, RGB_NOTE
    theirs = mobilevitv2_keys.to_timm_keys(read_file(reference).weights)
    own = next(key for key in state if key.endswith('stem.conv.weight'))
    if 'stem.conv.weight' not in theirs:
        raise WeightsError(f'{shorten_path(reference)} is not a file of MobileViTv2')
    if mobilevitv2_keys.color_order(state[own], theirs['stem.conv.weight']) == 'RGB':
        return state, f'its first convolution equals that of {shorten_path(reference)}, so it is for RGB images'
    return ({**state, own: state[own].flip(1)},
            f'its first convolution is that of {shorten_path(reference)} with reversed channels (BGR), and is reversed')


def _published(state: Dict[str, Tensor], model: nn.Module, to: str) -> Dict[str, Tensor]:
    """Rename weights to the names of a format."""
    if to in ('subquad', 'timm'):
        return state
    if hasattr(model, 'backbone'):
        from ..mm.published_keys import to_published_keys
        return to_published_keys(state, model)
    return model.published_state(state)


def _provenance(path: Path, content: WeightFile, source_format: str, notes: List[str]) -> Dict[str, Any]:
    """Describe where weights come from. The date is that of the conversion, in UTC."""
    from ... import __version__
    # state_dict does not say whether its weights are averaged: MMEngine keeps both there.
    kinds = {**dict.fromkeys(AVERAGED_KEYS, 'averaged'), **dict.fromkeys(RAW_KEYS, 'raw'), 'state_dict': ''}
    found = dict(source=path.name, sha256=sha256_of(path), size=path.stat().st_size, format=source_format,
                 weights=kinds.get(content.source, ''), source_key=content.source, key_map=KEY_MAP_VERSION,
                 subquad=__version__, date=datetime.now(timezone.utc).isoformat(timespec='seconds'), notes=notes)
    earlier = content.metadata.get('provenance')
    return {**found, 'earlier': earlier} if isinstance(earlier, dict) else found


def _write(state: Dict[str, Tensor], out: Path, to: str, dense: bool, metadata: Dict[str, Any]) -> None:
    """Write weights as their format's authors wrap them. Files of cvnets hold weights only, so no provenance."""
    if out.suffix == '.safetensors':
        save_state_dict(state, out, metadata)
        return
    state = {key: value.detach().cpu().clone() for key, value in state.items()}     # without the storage around a view
    content: Dict[str, Any] = state
    if to != 'cvnets' and dense:
        classes = {'dataset_meta': {'classes': tuple(metadata['classes'])}} if metadata.get('classes') else {}
        content = dict(state_dict=state, meta={**classes, 'subquad': metadata['provenance']})
    elif to != 'cvnets':
        content = dict(model=state, subquad=metadata['provenance'])
    with write_atomically(out) as temporary:
        torch.save(content, temporary)
