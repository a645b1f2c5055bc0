"""Load detectors and segmenters from files of this package, of MMEngine's Runner and of the papers' authors.

MMEngine's loader only logs weights that are missing or have other shapes, and continues with random ones.
`make_loading_strict` makes every way of loading strict: `load_from` and `resume` of a Runner, test.py and the
inferencers of both libraries, and the `init_cfg` of a whole model.
"""
import json
import logging
import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS
from mmengine.runner import CheckpointLoader
from torch import Tensor, nn

from ..weights import WeightsError, check_finite, differences, is_finite, read_checkpoint, read_file, some, unwrap
from ..weights.key_table import below
from ..weights.metadata import class_difference, dataset_classes, parse_config
from ..weights.resolve import SCHEME, resolve
from .cvnets import AUXILIARY, BACKBONE
from .published_keys import BUILT_CLASSES, has_unused_classes, translate_keys, unused_classes_note

# Options of a backbone that only act in training, and of a data preprocessor that only act on batches.
_TRAINING_OPTIONS = ('init_cfg', 'frozen_stages', 'norm_eval', 'with_cp', 'drop_path_rate', 'drop_rate')
_BATCHING = ('batch_augments', 'pad_mask', 'pad_seg', 'size', 'size_divisor', 'test_cfg', 'non_blocking')
_log_enabled: ContextVar[bool] = ContextVar('log_enabled', default=True)


@dataclass
class WeightsComparison:
    """Comparison of the weights of a file with a model.

    Attributes:
        weights: the weights that the model takes, under the model's keys.
        new: keys of the model whose weights keep their initial values.
        unused: keys of the file that the model does not have.
        problems: the reasons why the file cannot be loaded, one phrase each; empty if it can.
        classes_left_out: whether the classifiers keep the first of the file's classes only; see `has_unused_classes`.
    """
    weights: Dict[str, Tensor]
    new: List[str]
    unused: List[str]
    problems: List[str]
    classes_left_out: bool = False

    def summary(self, name: str) -> str:
        """Say which weights are loaded from the file of this name."""
        count, total = len(self.weights), len(self.weights) + len(self.new)
        text = f"{'all' if not self.new else f'{count} of'} {total} weights are loaded from {name}"
        if self.new:
            text += f'; {len(self.new)} are not and keep their initial values ({some(self.new, 6)})'
        if self.unused:
            text += f'; {len(self.unused)} in the file are not used ({some(self.unused, 6)})'
        if self.classes_left_out:
            text += f'; {unused_classes_note("the file")}'
        return text


def compare_weights(model: nn.Module, weights: Dict[str, Tensor],
                    new_heads: Optional[Sequence[str]] = None) -> WeightsComparison:
    """Compare weights with a detector or segmenter, without loading them.

    Args:
        model: a model of MMDetection or MMSegmentation with a backbone of this package.
        weights: name -> tensor, with the keys of this package, of a Runner or of the papers' authors.
        new_heads: None if every weight must match. Otherwise layers outside the backbone may have other shapes, and
            modules with these names may be missing; see `NewHeadsHook`.

    Returns:
        The comparison. An auxiliary head may always be missing, because inference does not use it.
    """
    skipped_keys = getattr(getattr(model, 'backbone', None), 'skipped_keys', None)
    skipped = [f'{BACKBONE}{key}' for key in skipped_keys(below(weights, BACKBONE))] if skipped_keys else []
    cut_classes = new_heads is None and has_unused_classes(weights, model)
    weights = translate_keys(weights, model, cut_classes)
    own = {key: value for key, value in model.state_dict().items()
           if key in weights or not key.endswith('num_batches_tracked')}
    new = set() if any(key.startswith(AUXILIARY) for key in weights) else {
        key for key in own if key.startswith(AUXILIARY)}
    if new_heads is not None:
        layers = {_layer(key) for key, value in own.items() if not key.startswith(BACKBONE)
                  and key in weights and weights[key].shape != value.shape}
        new |= {key for key in own if _layer(key) in layers or key not in weights and not key.startswith(BACKBONE)
                and any(key.startswith(f'{name}.') for name in new_heads)}
    wanted = {key: value for key, value in own.items() if key not in new}
    taken = {key: value for key, value in weights.items() if key in wanted}
    unused = [key for key in weights if key not in own]
    foreign = {key: weights[key] for key in unused if key.startswith(BACKBONE)}
    return WeightsComparison(taken, [key for key in own if key in new], unused + skipped,
                             differences(wanted, {**taken, **foreign}), cut_classes)


def _layer(key: str) -> str:
    return key.rpartition('.')[0]


def make_loading_strict(model: nn.Module) -> None:
    """Make a detector or segmenter raise an error for weights that do not match; see `compare_weights`."""
    if not model.__dict__.get('_loads_strictly'):
        model._loads_strictly = True
        model.register_load_state_dict_pre_hook(_check_model_weights)


def _check_model_weights(model: nn.Module, state: Dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Translate the keys of a state dict that is being loaded; raise an error if weights would stay random."""
    given = below(state, prefix)
    if any(isinstance(value, dict) for value in given.values()):          # authors' files: dict(model=weights)
        for key in given:
            del state[prefix + key]
        given = {key: value for key, value in unwrap(given, preferred='raw')[0].items() if isinstance(value, Tensor)}
    comparison = compare_weights(model, given, model.__dict__.get('new_heads'))
    if comparison.problems:
        translated = translate_keys(given, model)
        if hasattr(model, 'backbone') and any(key.startswith(BACKBONE) for key in translated):
            # The backbone's own error is more precise.
            getattr(model.backbone, 'check_complete', lambda *_: None)(translated, BACKBONE)
        raise WeightsError(mismatch_message('the file', model, given, comparison))
    for key in given:
        state.pop(prefix + key, None)
    unused = {key: value for key, value in translate_keys(given, model).items()
              if key not in model.state_dict()}
    state.update({prefix + key: value for key, value in {**comparison.weights, **unused}.items()})
    if _log_enabled.get():
        print_log(f'{type(model).__name__}: {comparison.summary("the file")}', logger='current')
        bad = [key for key, value in comparison.weights.items() if not is_finite(value)]
        if bad:
            print_log(f'{type(model).__name__}: the file contains NaN or infinite values ({some(bad)})',
                      logger='current', level=logging.WARNING)


def mismatch_message(name: str, model: nn.Module, given: Dict[str, Tensor], comparison: WeightsComparison) -> str:
    """Say why a file does not match a model, and what the user can do."""
    parts = [f"{name} is not a checkpoint of this {type(model).__name__}: {'; '.join(comparison.problems)}"]
    own = model.state_dict()
    if not any(key in own for key in translate_keys(given, model)):
        parts.append('to load a file of the backbone only, set model.backbone.init_cfg')
    elif not compare_weights(model, given, ()).problems:
        parts.append("to train other classes from this file, add custom_hooks=[dict(type='NewHeadsHook')]")
    return '; '.join(parts)


@HOOKS.register_module()
class NewHeadsHook(Hook):
    """Let `load_from` start training with new heads, for example to train a COCO detector on other classes.

    A layer outside the backbone whose weights have other shapes in the file keeps its initial weights; the log names
    these weights. Without this hook, loading such a file raises an error. The weights of the backbone must always
    match. The hook applies to `load_from` in training only: resuming and testing need every weight.

    Args:
        missing: names of modules that the file may lack, such as ['roi_head.mask_head'].

    Raises:
        TypeError: `missing` is not a sequence of strings.
    """

    priority = 'VERY_HIGH'                # before EMAHook copies the model

    def __init__(self, missing: Sequence[str] = ()):
        if isinstance(missing, str) or not all(isinstance(name, str) for name in missing):
            raise TypeError(f'missing must be a sequence of module names, got {missing!r}')
        self.missing = tuple(name.rstrip('.') for name in missing)

    def before_run(self, runner: Any) -> None:
        training = isinstance(runner.optim_wrapper, (OptimWrapper, OptimWrapperDict))
        if training and runner._load_from is not None and not runner._resume:
            _unwrap_model(runner.model).new_heads = self.missing

    def before_train(self, runner: Any) -> None:
        _unwrap_model(runner.model).__dict__.pop('new_heads', None)


def _unwrap_model(model: nn.Module) -> nn.Module:
    return getattr(model, 'module', model)               # distributed training wraps the model


@CheckpointLoader.register_scheme(prefixes=[r'.*\.safetensors$'], force=True)
def load_from_safetensors(filename: str, map_location: Any = None) -> Dict[str, Any]:
    """Read a .safetensors file for MMEngine's tools, which can otherwise read pickles only."""
    weights, _, _ = read_checkpoint(Path(filename).expanduser())
    return dict(state_dict=weights, meta={})


@CheckpointLoader.register_scheme(prefixes=[SCHEME], force=True)
def load_from_subquad(filename: str, map_location: Any = None) -> Dict[str, Any]:
    """Read published weights, such as 'subquad://ppma_tiny.mask_rcnn_1x_coco', for MMEngine's tools."""
    content = read_file(resolve(filename), preferred='raw')
    if content.choice:
        print_log(f'{filename}: {content.choice}', logger='current')
    return dict(state_dict=content.weights, meta=content.runner_meta)


@contextmanager
def _without_log() -> Iterator[None]:
    token = _log_enabled.set(False)
    try:
        yield
    finally:
        _log_enabled.reset(token)


def load_checkpoint(model: nn.Module, path: Union[str, Path], classes: Optional[Sequence[str]] = None,
                    allow_nonfinite: bool = False, network: Optional[Dict[str, Any]] = None) -> str:
    """Load a detector or segmenter strictly: all weights or none. MMEngine's function ignores missing keys.

    Args:
        model: a model of MMDetection or MMSegmentation with a backbone of this package.
        path: a Runner's checkpoint, a .safetensors file of its weights, a file that the authors of PPMA or
            MobileViTv2 published, or the name of published weights.
        classes: names of the classes. They must equal those in a file of `subquad train` or of a Runner.
        allow_nonfinite: accept weights that contain NaN or infinite values.
        network: options of the model, as `options_of` returns them. A warning names each option that differs from the
            options in a file of `subquad train` or of a Runner, because weights of the same shapes load into either
            network.

    Returns:
        The key of the checkpoint that held the weights; '' for safetensors and bare state dicts.

    Raises:
        WeightsError: the file cannot be read, or belongs to another model. The message names keys and shapes. An
            auxiliary head may be missing, because inference does not use it.
    """
    content = read_file(resolve(path), preferred='raw')
    weights, metadata, source, runner_meta, choice = content
    if choice:
        warnings.warn(f'{path}: {choice}', stacklevel=2)
    other = class_difference(content.classes, classes) if classes else ''
    if other:
        raise WeightsError(f'{path} {other}')
    cut_classes = has_unused_classes(weights, model) and len(dataset_classes(runner_meta)) != BUILT_CLASSES
    given, weights = weights, translate_keys(weights, model, cut_classes)
    if cut_classes:
        warnings.warn(unused_classes_note(str(path)), stacklevel=2)
    own = model.state_dict()
    if not any(key.startswith(AUXILIARY) for key in weights):
        weights.update((key, value) for key, value in own.items() if key.startswith(AUXILIARY))
    problems = differences(own, weights)
    if problems:
        raise WeightsError(f"{path} is not a checkpoint of this {type(model).__name__} on "
                           f"{type(model.backbone).__name__}: {'; '.join(problems)}")
    if not allow_nonfinite:
        check_finite(given, str(path))
    theirs = metadata.get('network') or options_of(parse_config(runner_meta.get('cfg')).get('model'))
    if network is not None and theirs:
        _warn_of_other_options(theirs, network, str(path))
    with _without_log():
        model.load_state_dict(weights)
    return source


def options_of(model: Any) -> Dict[str, Any]:
    """Return the options of backbone and preprocessor that change the computation.

    Args:
        model: the config of a detector or segmenter; anything else has no options.

    Returns:
        path in the model -> value.
    """
    found = {}
    for part, left_out in (('backbone', _TRAINING_OPTIONS), ('data_preprocessor', _BATCHING)):
        options = model.get(part) if isinstance(model, dict) else None
        for key, value in options.items() if isinstance(options, dict) else ():
            if key in left_out:
                continue
            try:
                found[f'{part}.{key}'] = json.loads(json.dumps(value))           # as JSON in a file returns it
            except (TypeError, ValueError):                       # classes and functions are skipped
                continue
    return found


def _warn_of_other_options(theirs: Dict[str, Any], ours: Dict[str, Any], name: str) -> None:
    def value_text(options: Dict[str, Any], key: str) -> str:
        return repr(options[key]) if key in options else 'its default'
    other = [f'model.{key} was {value_text(theirs, key)} and is {value_text(ours, key)}'
             for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    if other:
        other = [*other[:6], '...'] if len(other) > 6 else other
        warnings.warn(f"{name} was trained with other options: {'; '.join(other)}", stacklevel=3)
