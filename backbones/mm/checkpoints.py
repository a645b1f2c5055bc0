"""Load whole detectors and segmenters: our files, those of mmengine's Runner, and the authors'.

mmengine's loader logs weights that are missing or have other shapes and continues with random ones. `guard` makes
every load into a detector or segmenter strict, whichever tool asks for it: a Runner's `load_from` and `resume`, the
libraries' test.py and inferencers, and an `init_cfg` of the whole model.
"""
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

from ..weights import WeightsError, check_finite, differences, read_checkpoint, some, unwrap
from . import cvnets

BACKBONE, AUXILIARY = 'backbone.', 'auxiliary_head.'
_logged: ContextVar[bool] = ContextVar('logged', default=True)


@dataclass
class Fit:
    """How the weights of a file fit a model.

    Attributes:
        weights: those that the model takes, under its names.
        new: names of the model's weights that keep their initial values.
        unused: names of the file's weights that the model does not have.
        problems: what forbids loading, a phrase each.
    """
    weights: Dict[str, Tensor]
    new: List[str]
    unused: List[str]
    problems: List[str]

    def summary(self, name: str) -> str:
        """Which weights are loaded from the file of that name."""
        count, total = len(self.weights), len(self.weights) + len(self.new)
        text = f"{'all' if not self.new else f'{count} of'} {total} weights are loaded from {name}"
        if self.new:
            text += f'; {len(self.new)} are not and keep their initial values ({some(self.new, 6)})'
        if self.unused:
            text += f'; {len(self.unused)} in the file are not used ({some(self.unused, 6)})'
        return text


def fit(model: nn.Module, weights: Dict[str, Tensor], new_heads: Optional[Sequence[str]] = None) -> Fit:
    """Compare weights with a detector or segmenter, without loading them.

    Args:
        model: of MMDetection or MMSegmentation, on a backbone of this package.
        weights: under the names of this package, of a Runner or of the authors.
        new_heads: None where every weight must fit. Otherwise a layer outside the backbone may have other shapes, and
            the modules of these names may be missing; see `NewHeadsHook`.

    Returns:
        The comparison. An auxiliary head, which inference does not use, may always be missing.
    """
    part = {key.removeprefix(BACKBONE): value for key, value in weights.items() if key.startswith(BACKBONE)}
    of_backbone = getattr(getattr(model, 'backbone', None), 'left_out', None)
    left_out = [f'{BACKBONE}{key}' for key in of_backbone(part)] if of_backbone else []
    weights = translated(weights, model)
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
    return Fit(taken, [key for key in own if key in new], unused + left_out, differences(wanted, {**taken, **foreign}))


def _layer(key: str) -> str:
    return key.rpartition('.')[0]


def guard(model: nn.Module) -> None:
    """Make a detector or segmenter refuse weights that are not all of its own. See `fit` for what may differ."""
    if not model.__dict__.get('_guarded'):
        model._guarded = True
        model.register_load_state_dict_pre_hook(_refuse_gaps)


def _refuse_gaps(model: nn.Module, state: Dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Translate what is loaded, and refuse it where weights of the model would stay random."""
    given = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    if any(isinstance(value, dict) for value in given.values()):          # the authors' files: dict(model=weights)
        for key in given:
            del state[prefix + key]
        given = {key: value for key, value in unwrap(given)[0].items() if isinstance(value, Tensor)}
    found = fit(model, given, model.__dict__.get('new_heads'))
    if found.problems:
        names = translated(given, model)
        if hasattr(model, 'backbone') and any(key.startswith(BACKBONE) for key in names):
            getattr(model.backbone, 'refuse_gaps', lambda *_: None)(names, BACKBONE)      # the more precise error
        raise WeightsError(refusal('the file', model, given, found))
    for key in given:
        state.pop(prefix + key, None)
    unused = {key: value for key, value in translated(given, model).items() if key not in model.state_dict()}
    state.update({prefix + key: value for key, value in {**found.weights, **unused}.items()})
    if _logged.get():
        print_log(f'{type(model).__name__}: {found.summary("the file")}', logger='current')


def refusal(name: str, model: nn.Module, given: Dict[str, Tensor], found: Fit) -> str:
    """The sentence for a file that does not fit."""
    parts = [f"{name} is not a checkpoint of this {type(model).__name__}: {'; '.join(found.problems)}"]
    own = model.state_dict()
    if not any(key in own for key in translated(given, model)):
        parts.append('a file of the backbone alone goes into model.backbone.init_cfg')
    elif not fit(model, given, ()).problems:
        parts.append("to train other classes from it, add custom_hooks=[dict(type='NewHeadsHook')]")
    return '; '.join(parts)


@HOOKS.register_module()
class NewHeadsHook(Hook):
    """Let `load_from` start a training whose heads are not the file's, such as a COCO detector on other classes.

    A layer outside the backbone whose weights have other shapes in the file keeps the weights that it was initialized
    with; the log names them. Without this hook such a file is refused. Weights of the backbone must fit in any case.
    The hook acts on `load_from` in training only: resuming and testing need every weight.

    Args:
        missing: names of modules that the file may lack altogether, such as ['roi_head.mask_head'].

    Raises:
        TypeError: `missing` is not a sequence of names.
    """

    priority = 'VERY_HIGH'                # before EMAHook copies the model

    def __init__(self, missing: Sequence[str] = ()):
        if isinstance(missing, str) or not all(isinstance(name, str) for name in missing):
            raise TypeError(f'missing must be a sequence of names of modules, got {missing!r}')
        self.missing = tuple(name.rstrip('.') for name in missing)

    def before_run(self, runner: Any) -> None:
        training = isinstance(runner.optim_wrapper, (OptimWrapper, OptimWrapperDict))
        if training and runner._load_from is not None and not runner._resume:
            _inner(runner.model).new_heads = self.missing

    def before_train(self, runner: Any) -> None:
        _inner(runner.model).__dict__.pop('new_heads', None)


def _inner(model: nn.Module) -> nn.Module:
    return getattr(model, 'module', model)               # of several processes


@CheckpointLoader.register_scheme(prefixes=[r'.*\.safetensors$'], force=True)
def load_from_safetensors(filename: str, map_location: Any = None) -> Dict[str, Any]:
    """Give mmengine's tools, which read pickles only, the weights of a .safetensors file."""
    weights, _, _ = read_checkpoint(Path(filename).expanduser())
    return dict(state_dict=weights, meta={})


@contextmanager
def _unlogged() -> Iterator[None]:
    token = _logged.set(False)
    try:
        yield
    finally:
        _logged.reset(token)


def load_checkpoint(model: nn.Module, path: Union[str, Path], classes: Optional[Sequence[str]] = None,
                    allow_nonfinite: bool = False, network: Optional[Dict[str, Any]] = None) -> str:
    """Load every weight of a detector or segmenter, or none. mmengine's own function goes on where keys are missing.

    Args:
        model: of MMDetection or MMSegmentation, on a backbone of this package.
        path: a Runner's checkpoint, a .safetensors file of its weights, or a published file: PPMA's, or one of the
            MobileViTv2 authors' library (see `cvnets.translate`).
        classes: names that a file of `subquad train`, which knows its own, must agree with.
        allow_nonfinite: accept weights that hold NaN or infinities.
        network: options of the model, path -> value; a warning names those that a file of `subquad train` has
            otherwise, since weights of the same shapes fit both.

    Returns:
        Where in the file the weights were found ('' for safetensors and bare state dicts).

    Raises:
        WeightsError: the file cannot be read, or is not this model's: which keys, which shapes. Only an auxiliary head,
            which inference does not use, may be missing.
    """
    weights, facts, source = read_checkpoint(path)
    if classes:
        _check_classes(facts, list(classes), str(path))
    facts = facts if isinstance(facts, dict) else {}
    given, weights = weights, translated(weights, model)
    own = model.state_dict()
    if not any(key.startswith(AUXILIARY) for key in weights):
        weights.update((key, value) for key, value in own.items() if key.startswith(AUXILIARY))
    problems = differences(own, weights)
    if problems:
        raise WeightsError(f"{path} is not a checkpoint of this {type(model).__name__} on "
                           f"{type(model.backbone).__name__}: {'; '.join(problems)}")
    if not allow_nonfinite:
        check_finite(given, str(path))
    if network is not None and isinstance(facts.get('network'), dict):
        _warn_of_options(facts['network'], network, str(path))
    with _unlogged():
        model.load_state_dict(weights)
    return source


def _warn_of_options(theirs: Dict[str, Any], ours: Dict[str, Any], name: str) -> None:
    def said(options: Dict[str, Any], key: str) -> str:
        return repr(options[key]) if key in options else 'its default'
    other = [f'model.{key} was {said(theirs, key)} and is {said(ours, key)}'
             for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    if other:
        other = [*other[:6], '...'] if len(other) > 6 else other
        warnings.warn(f"{name} was trained with other options: {'; '.join(other)}", stacklevel=3)


def _check_classes(facts: Any, classes: List[str], name: str) -> None:
    """Refuse a file that knows other classes; `facts` are its metadata, which can be of any type."""
    known = facts.get('classes') if isinstance(facts, dict) else facts
    if known is None or known == classes:
        return
    if not isinstance(known, list) or not all(isinstance(word, str) for word in known):
        raise WeightsError(f'{name} holds metadata of another program: classes must be a list of names')
    raise WeightsError(f'{name} knows the classes {some(known, 6)}, the data has {some(classes, 6)}')


def translated(weights: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
    """The weights under our key names; ours come back as they are."""
    if not hasattr(model, 'backbone'):
        return dict(weights)
    weights = cvnets.translate(weights, model)
    translate = getattr(model.backbone, 'translate_checkpoint', None)
    if translate is None:
        return dict(weights)
    backbone = {key.removeprefix(BACKBONE): value for key, value in weights.items() if key.startswith(BACKBONE)}
    others = {key: value for key, value in weights.items() if not key.startswith(BACKBONE)}
    return {**{f'{BACKBONE}{key}': value for key, value in translate(backbone).items()}, **others}
