"""Loading weights into models, with an error for whatever does not fit."""
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .errors import NonFiniteError, PathLike, WeightsError, shown, some
from .files import check_plain, read_checkpoint, unwrap

Filter = Callable[[Dict[str, Any], nn.Module], Dict[str, Any]]
_COUNTER = 'num_batches_tracked'


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: nn.Module) -> Dict[str, Any]:
    """Weights under the model's key names.

    A whole checkpoint is unwrapped as by `unwrap`; the `backbone.` of a detector's file is taken off and the detector's
    heads with it; published key names are translated by the model's family.

    Raises:
        WeightsError: keys that are not strings.
    """
    weights, _ = unwrap(state_dict)
    if any(key.startswith('backbone.') for key in weights):
        weights = {key.removeprefix('backbone.'): value for key, value in weights.items()
                   if key.startswith('backbone.')}
    translate = getattr(model, 'translate_checkpoint', None)
    return translate(weights) if translate else weights


def pretrained_filter(features_only: bool = False, num_classes: Optional[int] = None, **_: Any) -> Filter:
    """The `pretrained_filter_fn` of a family, from what the user gave `timm.create_model`.

    timm loads leniently where the number of classes differs from the pretrained network's and for feature extractors.
    This filter raises `WeightsError` unless every weight of the backbone is in the file with its shape. A `UserWarning`
    names what may start untrained or changed: the classifier where `num_classes` was given, the first convolution of
    another `in_chans`, output norms.

    Args:
        features_only: the head is not needed.
        num_classes: None where it was not given; then the file's classifier must fit the model.

    Returns:
        filter(state_dict, model) -> a state dict that is complete, as `timm.models.build_model_with_cfg` calls it.
    """
    def complete(state_dict: Dict[str, Any], model: nn.Module) -> Dict[str, Any]:
        cfg: Dict[str, Any] = model.pretrained_cfg
        name = shown(cfg.get('file') or cfg.get('hf_hub_id') or cfg.get('url') or 'the state dict')
        weights, notes = fit(state_dict, model, name, headless=features_only, new_classifier=num_classes is not None,
                             adapt_input=True)
        if not features_only:
            # timm drops a classifier unless it has as many classes as this says; here it is the file's or the model's.
            cfg['num_classes'] = model.num_classes
        _say(name, notes)
        return weights
    return complete


def load_weights(model: nn.Module, path: PathLike, new_classifier: bool = False) -> str:
    """Load a file into a model, every weight of it.

    Args:
        model: made by timm; published key names are translated by its family's checkpoint filter.
        path: as for `read_checkpoint`.
        new_classifier: leave the model's classifier as it is where the file's has another size, or where the file has
            no head; a `UserWarning` says so.

    Returns:
        Where in the file the weights were found ('' for safetensors).

    Raises:
        WeightsError: the file cannot be read, or is not this model's: which keys, which shapes.
    """
    weights, _, source = read_checkpoint(path)
    load_state_dict(model, weights, shown(path), new_classifier)
    return source


def load_state_dict(model: nn.Module, weights: Dict[str, Tensor], name: str, new_classifier: bool = False) -> None:
    """`model.load_state_dict` after the family's filter, all or nothing; `name` is the file's, for messages.

    Only these may differ: a classifier's file lacks a dense backbone's output norms (identities then), and has a
    classifier to spare where the model has none; with `new_classifier`, the classifier. A `UserWarning` names what
    was not loaded.

    Raises:
        WeightsError: keys missing, keys to spare, shapes or kinds of numbers that differ.
    """
    weights, notes = fit(weights, model, name, new_classifier=new_classifier)
    model.load_state_dict(weights)
    _say(name, notes)


def fit(weights: Dict[str, Any], model: nn.Module, name: str, headless: bool = False, new_classifier: bool = False,
        adapt_input: bool = False) -> Tuple[Dict[str, Tensor], List[str]]:
    """A complete state dict of the model from a file's weights, and sentences on what is not the file's.

    Args:
        weights: of a file, as for `checkpoint_filter_fn`. model: may be on the meta device. name: the file's.
        headless: the head is not used and need not be in the file.
        new_classifier: a classifier of another size, or a file without a head, leaves the model's as it is.
        adapt_input: the first convolution may have another number of input channels, for timm to adapt.

    Raises:
        WeightsError: as for `load_state_dict`.
    """
    weights = {key: value for key, value in checkpoint_filter_fn(weights, model).items() if isinstance(value, Tensor)}
    check_plain(weights, name)
    own, notes = model.state_dict(), []
    classifier = [f'{layer}.{part}' for layer in _names(model, 'classifier', 'head.fc') for part in ('weight', 'bias')]
    in_head = tuple({f"{key.split('.')[0]}." for key in classifier})
    head = {key: value for key, value in own.items() if key.startswith(in_head)}
    if headless:
        weights = {**{key: value for key, value in weights.items() if not key.startswith(in_head)}, **head}
    elif not getattr(model, 'num_classes', 0):     # what needs no classifier needs no weights for one
        weights = {key: value for key, value in weights.items() if key in own or not key.startswith(in_head)}
    elif new_classifier:
        weights, said = _with_new_classifier(weights, own, classifier, head)
        notes += said
    norms = {key: value for key, value in own.items() if key.startswith('output_norms.')}
    if norms and not any(key.startswith('output_norms.') for key in weights):
        # A classifier's file for a dense backbone: its output norms start as they were made, as the identity.
        weights = {**norms, **weights}
        notes.append('it has no output norms, which start as the identity')
    elif headless and not norms and any(key.startswith('output_norms.') for key in weights):
        weights = {key: value for key, value in weights.items() if not key.startswith('output_norms.')}
        notes.append('its output norms are left out (output_norms=True loads them)')
    weights = {**{key: value for key, value in own.items() if key.endswith(_COUNTER)}, **weights}
    compared = dict(weights)
    if adapt_input:
        for key in [f'{layer}.weight' for layer in _names(model, 'first_conv', '')]:
            if _adaptable(weights.get(key), own.get(key), model):
                compared[key] = own[key]
                notes.append(f'its {key} has {weights[key].shape[1]} input channels and is adapted to '
                             f'{own[key].shape[1]}')
    _refuse(differences(own, compared), weights, own, classifier, model, name)
    return weights, notes


def _names(model: nn.Module, entry: str, default: str) -> Tuple[str, ...]:
    """Layers that timm's pretrained_cfg names."""
    names = (getattr(model, 'pretrained_cfg', None) or {}).get(entry) or default
    return (names,) if isinstance(names, str) else tuple(names)


def _with_new_classifier(weights: Dict[str, Tensor], own: Dict[str, Tensor], classifier: List[str],
                         head: Dict[str, Tensor]) -> Tuple[Dict[str, Tensor], List[str]]:
    """The weights with the model's own classifier where the file's has another size, or its head where it has none."""
    if not any(key in weights for key in head):
        return {**weights, **head}, ['it has no classifier, and the model\'s starts untrained']
    sizes = {key: (weights[key].shape[0], own[key].shape[0]) for key in classifier
             if key in own and key in weights and weights[key].ndim and weights[key].shape[1:] == own[key].shape[1:]}
    if not any(theirs != ours for theirs, ours in sizes.values()):
        return weights, []
    theirs, ours = next(pair for pair in sizes.values() if pair[0] != pair[1])
    return ({**weights, **{key: own[key] for key in classifier if key in own}},
            [f'its classifier of {theirs} classes is left out, and the model\'s of {ours} starts untrained'])


def _adaptable(theirs: Optional[Tensor], ours: Optional[Tensor], model: nn.Module) -> bool:
    """Whether timm adapts a first convolution: the file's has the pretrained network's channels, the model others."""
    if theirs is None or ours is None or theirs.ndim != 4 or ours.ndim != 4:
        return False
    channels = (model.pretrained_cfg.get('input_size') or (3,))[0]
    same = theirs.shape[0] == ours.shape[0] and theirs.shape[2:] == ours.shape[2:]
    return same and theirs.shape[1] == channels != ours.shape[1]


def _refuse(problems: List[str], weights: Dict[str, Tensor], own: Dict[str, Tensor], classifier: List[str],
            model: nn.Module, name: str) -> None:
    """Raises WeightsError where there are problems."""
    if not problems:
        return
    kind = (getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or type(model).__name__
    key = classifier[0]
    hint = ''
    if key in own and key in weights and weights[key].ndim and weights[key].shape[0] != own[key].shape[0]:
        hint = f' (its classifier has {weights[key].shape[0]} classes: num_classes={weights[key].shape[0]})'
    raise WeightsError(f"{name} is not a checkpoint of this {kind}: {'; '.join(problems)}{hint}")


def _say(name: str, notes: List[str]) -> None:
    if notes:
        warnings.warn(f"{name}: {'; '.join(notes)}", stacklevel=3)


def differences(own: Dict[str, Tensor], weights: Dict[str, Tensor]) -> List[str]:
    """What keeps `weights` from being those of a model whose state dict is `own`: a phrase for each kind of trouble."""
    problems: List[str] = []
    for what, keys in (('missing', [k for k in own if k not in weights]),
                       ('not in the model', [k for k in weights if k not in own])):
        if keys:
            problems.append(f'{len(keys)} keys {what} ({some(keys)})')
    shapes = [f'{k} {tuple(weights[k].shape)} instead of {tuple(own[k].shape)}' for k in own
              if k in weights and weights[k].shape != own[k].shape]
    if shapes:
        problems.append(f'{len(shapes)} shapes differ ({some(shapes)})')
    kinds = [f'{k} {weights[k].dtype} instead of {own[k].dtype}' for k in own
             if k in weights and own[k].is_floating_point() and not weights[k].is_floating_point()]
    if kinds:
        problems.append(f'{len(kinds)} are not floating-point ({some(kinds)})')
    return problems


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. PyTorch's own test does not know numbers of 8 bits."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


def check_finite(weights: Dict[str, Tensor], name: str) -> None:
    """Refuse weights that hold NaN or infinities; `name` is the file's, for the message.

    Raises:
        NonFiniteError: which tensors hold them.
    """
    bad = [key for key, tensor in weights.items() if not is_finite(tensor)]
    if bad:
        raise NonFiniteError(f'{name} holds NaN or infinite values in {len(bad)} of {len(weights)} tensors '
                             f'({some(bad)})')
