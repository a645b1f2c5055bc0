"""Start training from the weights of a file, and report every weight that is not used."""
import sys
from typing import Any, Dict, List, Optional, Sequence

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from torch import Tensor, nn

from ....backbones.weights import check_finite, check_options, checkpoint_filter_fn, differences, read_file, some
from ....backbones.weights.files import WeightFile
from ....backbones.weights.metadata import class_difference
from ....backbones.weights.resolve import resolve
from ...common.cli import UserError, weight_errors
from ..classification.weight_files import own_metadata, recorded_transform, transform_differences, values

# Prefixes of classifier weights, in this package and in timm.
_CLASSIFIERS = ('head.', 'fc.', 'classifier.', 'head_dist.')
# Options of a network that only act in training.
_TRAINING_OPTIONS = ('num_classes', 'drop_rate', 'drop_path_rate')


def say(text: str) -> None:
    """Print one line on stderr, from the main process only."""
    if is_main_process():
        print(text, file=sys.stderr, flush=True)


def starting_point(config: Any, weights: Optional[str] = None) -> str:
    """Describe the weights at the start of training."""
    if config.get('resume') and config.get('load_from'):
        return f'the state in {config.load_from}'
    if weights or config.get('load_from'):
        return f'the weights in {weights or config.load_from}'
    cfgs = config.model.get('backbone', {}).get('init_cfg') if isinstance(config.model.get('backbone'), dict) else None
    cfgs = cfgs if isinstance(cfgs, (list, tuple)) else [cfgs]
    files = [str(cfg.get('checkpoint')) for cfg in cfgs if isinstance(cfg, dict) and cfg.get('type') == 'Pretrained']
    return f'random weights but for the backbone in {files[0]}' if files else 'random weights'


def adopt_options(config: Any, path: str) -> None:
    """Take the network's options from a file of `subquad train` unless the config sets them, and compare transforms.

    A wrong option can leave every shape of a weight the same, so that nothing else would notice it.
    """
    content = _checkpoint(path, allow_nonfinite=bool(config.get('resume')))
    with weight_errors():
        metadata = own_metadata(content, path)
        if not config.get('resume'):                         # ResumableRunner names the settings that differ
            theirs, ours = recorded_transform(path, content), config.train_dataloader.dataset.get('transform')
            other = transform_differences(theirs, ours) if theirs and ours else {}
            other = {key: other[key] for key in ('input_size', 'mean', 'std') if key in other}
            if other:
                say(f'{path} is for images with {values(other, 0)}; this training has {values(other, 1)}')
    if not isinstance(metadata.get('model'), str):
        return
    for key, value in network_options(metadata, path, config.model).items():
        if key in _TRAINING_OPTIONS:
            continue
        given = config.model.setdefault(key, value)
        if not config.get('resume') and given != value and (
                list(given if isinstance(given, (list, tuple)) else [given]) != value):
            say(f'{path} was trained with {key}={value!r}; the config has {key}={given!r}, which is kept')


def network_options(metadata: Dict[str, Any], path: str, model: Dict[str, Any]) -> Dict[str, Any]:
    """Return the network's options in a file's metadata, checked for types and bounds unless the config has them."""
    if metadata.get('model') != model['name']:
        raise UserError(f"{path} was trained as {metadata.get('model')}, but the config builds {model['name']} "
                        '(--model NAME changes it)')
    options = metadata.get('options') or {}
    same = {key: value for key, value in options.items() if key in model and model[key] == value}
    with weight_errors():
        return {**same, **check_options(metadata['model'], {k: v for k, v in options.items() if k not in same}, path)}


def load_starting_weights(net: nn.Module, path: str, classes: Sequence[str]) -> None:
    """Load every weight of a file, or of published weights, into a timm model that is trained on `classes`.

    The classifier may stay random if the file has none or one for other classes; a message on stderr says so.
    """
    content = _checkpoint(path)
    weights, own = checkpoint_filter_fn(content.weights, net), net.state_dict()
    head = _classifier_keys(net, own)
    why = _other_classes(weights, own, head, content.classes, classes)
    if why:
        weights = {**{key: value for key, value in weights.items() if key not in head},
                   **{key: own[key] for key in head}}
    _compare(own, weights, path,
             getattr(net, 'pretrained_cfg', {}).get('architecture') or type(net).__name__)
    net.load_state_dict(weights)
    if content.choice:
        say(f'{path}: {content.choice}')
    if why:
        say(f'{path} {why}: the classifier ({some(head)}) starts with random weights')


def refuse_other_state(net: nn.Module, path: str) -> None:
    """Refuse to resume from a checkpoint of another network, of which MMEngine would load the matching weights."""
    weights = _checkpoint(path, allow_nonfinite=True).weights
    weights = {key.removeprefix('net.'): value for key, value in weights.items() if key.startswith('net.')} or weights
    _compare(net.state_dict(), weights, path, type(net).__name__)


def _compare(own: Dict[str, Tensor], weights: Dict[str, Tensor], path: str, kind: str) -> None:
    """Refuse weights whose keys or shapes differ from a model's own."""
    problems = differences(own, weights)
    if problems:
        raise UserError(f"{path} is not a checkpoint of this {kind}: {'; '.join(problems)}")


def _other_classes(weights: Dict[str, Tensor], own: Dict[str, Tensor], head: List[str], theirs: Sequence[str],
                   ours: Sequence[str]) -> Optional[str]:
    """Return why the file's classifier cannot be used, or None if it can."""
    if not head:
        return None
    if not any(key in weights for key in head):
        return 'has no classifier'
    changed = [key for key in head if key in weights and weights[key].shape != own[key].shape]
    if changed and all(weights[key].shape[1:] == own[key].shape[1:] for key in changed):
        return f'has {len(weights[changed[0]])} classes, the data {len(ours)}'
    return (not changed and class_difference(theirs, ours)) or None


def _classifier_keys(net: nn.Module, own: Dict[str, Tensor]) -> List[str]:
    names = getattr(net, 'pretrained_cfg', {}).get('classifier') or ()
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names:
        classifier = net.get_classifier()
        names = tuple(name for name, module in net.named_modules() if module is classifier)
    return [key for key in own if key.startswith(tuple(f'{name}.' for name in names))]


def _checkpoint(path: str, preferred: str = 'averaged', allow_nonfinite: bool = False) -> WeightFile:
    """Read a file or published weights; `preferred` as `read_file` takes it."""
    with weight_errors():
        content = read_file(resolve(path), preferred=preferred)
        if not allow_nonfinite:
            check_finite(content.weights, path)
    return content


class StartHook(Hook):
    """Starts a detector or segmenter from a file of its weights, or its backbone from a classifier's.

    From a file that holds averaged weights, too, the raw ones are taken, as PPMA's authors do.

    Args:
        path: File of weights, or the name of published ones.
    """

    priority = 'VERY_HIGH'

    def __init__(self, path: str):
        self.path, self.weights, self.what = path, {}, ''

    def prepare(self, model: nn.Module, classes: Sequence[str]) -> None:
        """Read the file and match its weights with the model."""
        from ....backbones.mm.published_keys import has_unused_classes, translate_keys, unused_classes_note
        content = _checkpoint(self.path, 'raw')
        cut_classes = has_unused_classes(content.weights, model)
        whole = translate_keys(content.weights, model, cut_classes)
        if cut_classes:
            say(unused_classes_note(self.path))
        if any(key.startswith('backbone.') for key in whole):
            self._prepare_whole(model, whole, content.classes, list(classes))
        else:
            self._prepare_backbone(model.backbone, content.weights)
        if content.choice:
            say(f'{self.path}: {content.choice}')

    def _prepare_whole(self, model: nn.Module, weights: Dict[str, Tensor], theirs: List[str],
                       ours: List[str]) -> None:
        own = model.state_dict()
        resized = [key for key in own if key in weights and not key.startswith(('backbone.', 'neck.'))
                   and weights[key].shape != own[key].shape and weights[key].shape[1:] == own[key].shape[1:]]
        absent = [key for key in own if key.startswith('auxiliary_head.')]
        absent = absent if not any(key in weights for key in absent) else []
        _compare(own, {**weights, **{key: own[key] for key in (*resized, *absent)}}, self.path,
                 f'{type(model).__name__} on {type(model.backbone).__name__}')
        self.what, self.weights = 'the whole model', {k: v for k, v in weights.items() if k not in resized}
        if resized:
            say(f'{self.path} has other numbers of classes: {len(resized)} tensors of the heads start with random '
                f'weights ({some(resized)})')
        elif class_difference(theirs, ours):
            say(f'{self.path} {class_difference(theirs, ours)}: the heads start from those of the file')
        if absent:
            say(f'{self.path} has no auxiliary head: it starts with random weights')

    def _prepare_backbone(self, backbone: nn.Module, weights: Dict[str, Tensor]) -> None:
        own, weights = backbone.state_dict(), checkpoint_filter_fn(weights, backbone)
        spare = [key for key in weights if key not in own and key.startswith(_CLASSIFIERS)]
        weights = {key: value for key, value in weights.items() if key not in spare}
        norms = [key for key in own if key.startswith('output_norms.')]
        norms = norms if not any(key in weights for key in norms) else []
        _compare(own, {**weights, **{key: own[key] for key in norms}}, self.path,
                 f'{type(backbone).__name__} backbone')
        self.what, self.weights = 'the backbone', {f'backbone.{key}': value for key, value in weights.items()}
        text = f'{self.path} is a classifier: the backbone starts from it, neck and heads with random weights'
        more = [f"its classifier ({some(spare)}) is not used"] if spare else []
        more += ['the output norms start untrained (weight 1, bias 0)'] if norms else []
        say('; '.join([text, *more]))

    def before_train(self, runner) -> None:
        """Load the weights after the Runner has initialized the model."""
        model = getattr(runner.model, 'module', runner.model)
        weights = {**model.state_dict(), **self.weights}
        runner.call_hook('after_load_checkpoint', checkpoint=dict(state_dict=weights))   # EMAHook's average, too
        model.load_state_dict(weights)


def without_pretrained(model: Any) -> None:
    """Remove the pretrained files of the backbone from the config, because --weights replaces them."""
    backbone = model.get('backbone')
    if isinstance(backbone, dict):
        cfgs = backbone.get('init_cfg')
        cfgs = [cfgs] if isinstance(cfgs, dict) else list(cfgs or ())
        kept = [cfg for cfg in cfgs if cfg.get('type') != 'Pretrained']
        if len(kept) < len(cfgs):
            say('--weights: the backbone\'s init_cfg '
                f"({', '.join(str(cfg.get('checkpoint')) for cfg in cfgs if cfg not in kept)}) is not used")
            backbone.init_cfg = kept or None
