"""Load weights into models, and raise an error for every difference that is not allowed."""
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .errors import NonFiniteError, PathLike, WeightsError, shorten_path, some
from .files import check_dense, read_file, unwrap
from .key_table import below
from .resolve import ADDRESS, fetch_address, refuse_hybrid, resolve

Weights = Dict[str, Tensor]
Filter = Callable[[Dict[str, Any], nn.Module], Dict[str, Any]]
_COUNTER = 'num_batches_tracked'


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: nn.Module) -> Dict[str, Any]:
    """Rename the weights of a checkpoint to the keys of the model.

    The weights are taken out of a checkpoint by `unwrap`. From a detector's file only the backbone is taken. The
    model's family translates published keys.

    Raises:
        WeightsError: a name of a weight is not a string.
    """
    weights, _ = unwrap(state_dict)
    if any(key.startswith('backbone.') for key in weights):
        weights = below(weights, 'backbone.')
    translate = getattr(model, 'translate_checkpoint', None)
    return translate(weights) if translate else weights


def pretrained_filter(features_only: bool = False, num_classes: Optional[int] = None, file: str = '',
                      cache_dir: Optional[PathLike] = None, **_: Any) -> Filter:
    """Make the `pretrained_filter_fn` of a family from the arguments of `timm.create_model`.

    timm loads non-strictly if the number of classes differs from the pretrained network's and for feature extractors.
    This filter raises `WeightsError` unless the file has every weight of the backbone with its shape. A `UserWarning`
    names what is untrained or changed: the classifier if `num_classes` was given, the first convolution for another
    `in_chans`, output norms.

    Args:
        features_only: whether the model is a feature extractor, which needs no head.
        num_classes: the number of classes that the caller gave. With None the file's classifier must match the model.
        file: a file, the name of published weights, or an http address, to read instead of the state dict that timm
            passes, because timm refuses some files that `read_file` reads safely; '' for none.
        cache_dir: the folder of downloads; see `subquad.backbones.weights.download.fetch`.

    Returns:
        filter(state_dict, model) -> complete state dict, as `timm.models.build_model_with_cfg` calls it.
    """
    def complete(state_dict: Dict[str, Any], model: nn.Module) -> Dict[str, Any]:
        cfg: Dict[str, Any] = model.pretrained_cfg
        given = not file and cfg.get('state_dict')       # timm takes it before any address
        name = 'the state dict' if given else shorten_path(
            file or cfg.get('file') or cfg.get('hf_hub_id') or cfg.get('url') or 'the state dict')
        choice = ''
        if file:
            content = read_file((fetch_address if file.startswith(ADDRESS) else resolve)(file, cache_dir))
            state_dict, choice = content.weights, content.choice
            cfg.pop('state_dict', None)                  # stands for the file
        weights, notes = match_to_model(state_dict, model, name, headless=features_only,
                                        new_classifier=num_classes is not None, adapt_input=True)
        if not features_only:
            # timm drops a classifier whose number of classes differs from this entry, so the entry is set to the
            # model's. The classifier itself has been checked or replaced above.
            cfg['num_classes'] = model.num_classes
        _warn(name, [choice, *notes, *_nonfinite_note(weights)])
        return weights
    return complete


def _nonfinite_note(weights: Weights) -> List[str]:
    """Return a sentence if weights contain NaN or infinite values."""
    bad = [key for key, value in weights.items() if not is_finite(value)]
    return [f'it contains NaN or infinite values ({some(bad)})'] if bad else []


def load_weights(model: nn.Module, path: PathLike, new_classifier: bool = False, weights: Optional[str] = None) -> str:
    """Load a weight file into a model. All weights are loaded, or none.

    Args:
        model: a timm model; its family translates published keys.
        path: the path of a file or the name of published weights; see `subquad.backbones.weights.resolve`.
        new_classifier: keep the model's classifier if the file's has another size or the file has no head. A
            `UserWarning` says so.
        weights: 'averaged' or 'raw' if the file holds both; see `read_file`. A `UserWarning` says which were read.

    Returns:
        The key of the checkpoint that held the weights; '' for safetensors.

    Raises:
        ValueError: `weights` is not allowed.
        WeightsError: the file cannot be read, or belongs to another model. The message names keys and shapes. Published
            weights are refused for a model with other mixers (`mixers`, `attention_share`).
    """
    refuse_hybrid(path, getattr(model, 'hybrid_options', {}))
    content = read_file(resolve(path), weights)
    load_state_dict(model, content.weights, shorten_path(path), new_classifier)
    _warn(shorten_path(path), [content.choice, *_nonfinite_note(content.weights)])
    return content.source


def load_state_dict(model: nn.Module, weights: Weights, name: str, new_classifier: bool = False) -> None:
    """Translate the weights of a file and load them. All weights are loaded, or none.

    Three differences are allowed: a classifier's file may lack the output norms of a dense backbone, which then keep
    their initial values (weight 1, bias 0); the file may have a classifier that the model lacks; with `new_classifier`,
    the classifier may differ. A `UserWarning` names what was not loaded.

    Args:
        model: the model.
        weights: name -> tensor.
        name: the name of the file, for messages.
        new_classifier: see `load_weights`.

    Raises:
        WeightsError: keys are missing or unknown, or shapes or dtypes differ.
    """
    weights, notes = match_to_model(weights, model, name, new_classifier=new_classifier)
    model.load_state_dict(weights)
    _warn(name, notes)


def match_to_model(weights: Dict[str, Any], model: nn.Module, name: str, headless: bool = False,
                   new_classifier: bool = False, adapt_input: bool = False) -> Tuple[Weights, List[str]]:
    """Build a complete state dict of the model from the weights of a file, without loading it.

    Args:
        weights: the weights of a file; see `checkpoint_filter_fn`.
        model: the model, which may be on the meta device.
        name: the name of the file, for messages.
        headless: the head is not used, so the file may lack it.
        new_classifier: keep the model's classifier if the file's has another size or the file has no head.
        adapt_input: the first convolution may have another number of input channels, which timm adapts.

    Returns:
        The state dict, and one sentence for each difference from the file.

    Raises:
        WeightsError: see `load_state_dict`.
    """
    weights = {key: value for key, value in checkpoint_filter_fn(weights, model).items() if isinstance(value, Tensor)}
    check_dense(weights, name)
    own = model.state_dict()
    classifier = [f'{layer}.{part}' for layer in _cfg_layers(model, 'classifier', 'head.fc')
                  for part in ('weight', 'bias')]
    weights, notes = _match_head(weights, own, classifier, headless, new_classifier,
                                 has_classes=bool(getattr(model, 'num_classes', 0)))
    weights, norm_notes = _match_output_norms(weights, own, headless)
    notes += norm_notes
    weights = {**{key: value for key, value in own.items() if key.endswith(_COUNTER)}, **weights}
    compared = dict(weights)
    if adapt_input:
        for key in [f'{layer}.weight' for layer in _cfg_layers(model, 'first_conv', '')]:
            if _is_adaptable(weights.get(key), own.get(key), model):
                compared[key] = own[key]
                notes.append(f'its {key} has {weights[key].shape[1]} input channels and is adapted to '
                             f'{own[key].shape[1]}')
    problems = differences(own, compared)
    if problems:
        raise WeightsError(_mismatch_message(problems, weights, own, classifier, model, name))
    return weights, notes


def _cfg_layers(model: nn.Module, entry: str, default: str) -> Tuple[str, ...]:
    """Return the names of the layers that an entry of timm's pretrained_cfg lists."""
    names = (getattr(model, 'pretrained_cfg', None) or {}).get(entry) or default
    return (names,) if isinstance(names, str) else tuple(names)


def _match_head(weights: Weights, own: Weights, classifier: List[str], headless: bool, new_classifier: bool,
                has_classes: bool) -> Tuple[Weights, List[str]]:
    """Take the head from the model or drop it where the arguments of `match_to_model` allow this."""
    prefixes = tuple({f"{key.split('.')[0]}." for key in classifier})
    head = {key: value for key, value in own.items() if key.startswith(prefixes)}
    if headless:
        body = {key: value for key, value in weights.items() if not key.startswith(prefixes)}
        return {**body, **head}, []
    if not has_classes:                    # a model without a classifier needs no weights for one
        return {key: value for key, value in weights.items() if key in own or not key.startswith(prefixes)}, []
    if new_classifier:
        return _with_new_classifier(weights, own, classifier, head)
    return weights, []


def _with_new_classifier(weights: Weights, own: Weights, classifier: List[str],
                         head: Weights) -> Tuple[Weights, List[str]]:
    """Take the model's classifier if the file's has another size, or the model's head if the file has none."""
    if not any(key in weights for key in head):
        return {**weights, **head}, ['it has no classifier, and the model\'s starts untrained']
    sizes = {key: (weights[key].shape[0], own[key].shape[0]) for key in classifier
             if key in own and key in weights and weights[key].ndim and weights[key].shape[1:] == own[key].shape[1:]}
    if not any(theirs != ours for theirs, ours in sizes.values()):
        return weights, []
    theirs, ours = next(pair for pair in sizes.values() if pair[0] != pair[1])
    return ({**weights, **{key: own[key] for key in classifier if key in own}},
            [f'its classifier of {theirs} classes is left out, and the model\'s {ours}-class classifier starts '
             'untrained'])


def _match_output_norms(weights: Weights, own: Weights, headless: bool) -> Tuple[Weights, List[str]]:
    """Take the output norms from the model if the file has none; drop the file's if a feature extractor has none."""
    norms = {key: value for key, value in own.items() if key.startswith('output_norms.')}
    in_file = any(key.startswith('output_norms.') for key in weights)
    if norms and not in_file:
        return {**norms, **weights}, ['it has no output norms; they start untrained (weight 1, bias 0)']
    if headless and not norms and in_file:
        return ({key: value for key, value in weights.items() if not key.startswith('output_norms.')},
                ['its output norms are left out (output_norms=True loads them)'])
    return weights, []


def _is_adaptable(theirs: Optional[Tensor], ours: Optional[Tensor], model: nn.Module) -> bool:
    """True if only the number of input channels differs and the file's is the pretrained network's."""
    if theirs is None or ours is None or theirs.ndim != 4 or ours.ndim != 4:
        return False
    channels = (model.pretrained_cfg.get('input_size') or (3,))[0]
    same = theirs.shape[0] == ours.shape[0] and theirs.shape[2:] == ours.shape[2:]
    return same and theirs.shape[1] == channels != ours.shape[1]


def _mismatch_message(problems: List[str], weights: Weights, own: Weights, classifier: List[str], model: nn.Module,
                      name: str) -> str:
    """Say that a file belongs to another model, and name `num_classes` if the classifier has another size."""
    kind = (getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or type(model).__name__
    key = classifier[0]
    hint = ''
    if key in own and key in weights and weights[key].ndim and weights[key].shape[0] != own[key].shape[0]:
        classes = weights[key].shape[0]
        hint = f' (its classifier has {classes} classes; use num_classes={classes})'
    hybrid = getattr(model, 'hybrid_options', None)
    if hybrid:
        options = ', '.join(f'{key}={value!r}' for key, value in hybrid.items())
        hint += f' (the model has {options}, and loads only files that were trained with the same)'
    return f"{name} is not a checkpoint of this {kind}: {'; '.join(problems)}{hint}"


def _warn(name: str, notes: List[str]) -> None:
    text = '; '.join(filter(None, notes))
    if text:
        warnings.warn(f'{name}: {text}', stacklevel=3)


def differences(own: Weights, weights: Weights) -> List[str]:
    """List why weights do not match a model: missing and unknown keys, shapes, dtypes.

    Args:
        own: the state dict of the model.
        weights: the weights to compare with it.

    Returns:
        One phrase for each kind of difference; an empty list if the weights match.
    """
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
    """True if no value is NaN or infinite. `torch.isfinite` does not support 8-bit floats; this function does."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


def check_finite(weights: Weights, name: str) -> None:
    """Check that no weight is NaN or infinite.

    Args:
        weights: name -> tensor.
        name: the name of the file, for the message.

    Raises:
        NonFiniteError: some tensors contain such values; the message names the tensors.
    """
    bad = [key for key, tensor in weights.items() if not is_finite(tensor)]
    if bad:
        raise NonFiniteError(f'{name} holds NaN or infinite values in {len(bad)} of {len(weights)} tensors '
                             f'({some(bad)})')
