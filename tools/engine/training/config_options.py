"""Check the keys of --cfg-options, so that each of them has an effect.

A key is accepted if the config has it, or if the code that reads that part of the config accepts it: the Runner at the
top, and inside a dict the constructor of the class that its `type` names. A variable that only the config file uses to
compute other entries is refused, because options are applied after the file has been read.
"""
import difflib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ...common.cli import UserError

RULE = 'valid keys: entries of the config, arguments of the Runner, or arguments of the class that `type` names'
# Entries that another flag sets, and how.
_ELSEWHERE = {'work_dir': 'give --work-dir', 'log_level': 'give --verbose', 'cfg': 'give the config file',
              'custom_imports': 'it acts while the config file is read: write it in a config file',
              'data_root': 'give --data'}
# Entries that the Runner and these tools read beside the Runner's arguments.
_ALSO_READ = ('model_wrapper_cfg', 'find_unused_parameters', 'sync_bn', 'compile', 'activation_checkpointing',
              'efficient_conv_bn_eval', 'allow_other_classes', 'strict_images', 'tta_model', 'tta_pipeline')
_REGISTRIES = ('MODELS', 'DATASETS', 'DATA_SAMPLERS', 'TRANSFORMS', 'HOOKS', 'METRICS', 'EVALUATOR', 'LOOPS',
               'OPTIMIZERS', 'OPTIM_WRAPPERS', 'PARAM_SCHEDULERS', 'VISUALIZERS', 'VISBACKENDS', 'LOG_PROCESSORS',
               'WEIGHT_INITIALIZERS', 'TASK_UTILS')
# Entries of the top level that are True or False.
_SWITCHES = ('resume', 'find_unused_parameters', 'allow_other_classes', 'strict_images', 'model.channels_last',
             'model.grad_checkpointing')
_HOOKS = {'runtime_info', 'timer', 'sampler_seed', 'logger', 'param_scheduler', 'checkpoint', 'visualization'}


class Accepted(NamedTuple):
    """The keys that the reader of a dict accepts.

    Attributes:
        names: The accepted keys; None for any key.
        known: Whether the reader of the dict is known.
    """
    names: Optional[Set[str]] = None
    known: bool = True


# The reader checks its own **kwargs; nothing is known about the reader.
_ANY, _UNKNOWN = Accepted(), Accepted(known=False)


def runner_arguments() -> List[str]:
    """Return the names of the Runner's arguments."""
    from mmengine.runner import Runner
    return list(inspect.signature(Runner.__init__).parameters)[1:]


def read_entries() -> List[str]:
    """Return the top-level entries that are read after a config file has run."""
    skipped = (*_ELSEWHERE, 'data_preprocessor')
    return [name for name in (*runner_arguments(), *_ALSO_READ) if name not in skipped]


def check_options(config: Any, options: Dict[str, Any], name: str) -> None:
    """Refuse options that have no effect.

    Args:
        config: The config before the options are merged in.
        options: Values by dotted key.
        name: Name of the config, for messages.

    Raises:
        UserError: A key has no effect; the message gives the nearest key that has one.
    """
    from mmengine.registry import DefaultScope
    with DefaultScope.overwrite_default_scope(config.get('default_scope')):
        for key in options:
            root, *rest = key.split('.')
            if root not in read_entries():
                raise UserError(f'--cfg-options {key}: {_no_such_root(config, root, name)}')
            if root not in config and rest:
                _check_absent(root, rest, key, options, name)
            _check_entry(config[root] if root in config else {}, [root], rest, key, options)
            _check_boolean(config, key, options[key])


def check_entries(config: Any, path: Any) -> None:
    """Refuse a key of a config file that the reader of its dict does not accept.

    Args:
        config: The config.
        path: Its file, for messages.

    Raises:
        UserError: No reader accepts a key; the message gives the nearest key that one accepts.
    """
    from mmengine.registry import DefaultScope
    with DefaultScope.overwrite_default_scope(config.get('default_scope')):
        for root in read_entries():
            if root in config:
                _check_below(config[root], root, path)


def _check_below(value: Any, above: str, path: Any) -> None:
    """Check the keys of a dict, and those below it; `above` is its dotted key."""
    if isinstance(value, dict):
        accepted = _accepted(value, value.get('type'), above).names
        for key, item in value.items():
            # Further default hooks may have any name.
            named = above == 'default_hooks' and isinstance(item, dict) and 'type' in item
            if accepted is not None and key not in accepted and not named:
                near = difflib.get_close_matches(key, sorted(accepted), n=3, cutoff=0.5)
                raise UserError(f"{path}: {above} accepts no {key!r}"
                                f"{'; did you mean ' + ', '.join(near) + '?' if near else ''} ({RULE})")
            _check_below(item, f'{above}.{key}', path)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_below(item, f'{above}.{index}', path)


def _check_boolean(config: Any, key: str, value: Any) -> None:
    """Refuse text, such as 'Tru', for an entry that is True or False: any text counts as true."""
    node: Any = config
    for part in key.split('.'):
        if isinstance(node, (list, tuple)):
            node = node[int(part)] if part.isdigit() and int(part) < len(node) else None
        else:
            node = node.get(part) if hasattr(node, 'get') else None
    if isinstance(value, str) and (isinstance(node, bool) or key in _SWITCHES):
        raise UserError(f'--cfg-options {key} must be True or False, got {value!r}')


def _check_absent(root: str, rest: List[str], key: str, options: Dict[str, Any], name: str) -> None:
    """Refuse a key below an entry that the config does not have, unless its reader is known."""
    if rest[0].isdigit():
        raise UserError(f'--cfg-options {key}: {name} has no {root!r}; write the list in a config file')
    if rest != ['type'] and not _accepted({}, options.get(f'{root}.type'), root).known:
        raise UserError(f'--cfg-options {key}: {name} has no {root!r}; write it in a config file')


def _no_such_root(config: Any, root: str, name: str) -> str:
    entries = [entry for entry in read_entries() if entry in config]
    leaves = [path for entry in entries for path, _ in _leaves(config[entry], entry)]
    if root in config:
        why = f'{root!r} is only used while {name} is read, so overriding it has no effect'
        same = [path for path, value in (item for entry in entries for item in _leaves(config[entry], entry))
                if type(value) is type(config[root]) and value == config[root]]
        near = _nearest(root, same, 0.3) or _nearest(root, leaves)
    else:
        why, near = f'no {root!r} in {name}', _nearest(root, [*read_entries(), *leaves])
    if root in _ELSEWHERE:
        return f'{why}; {_ELSEWHERE[root]}'
    return f"{why}; {'did you mean ' + ', '.join(near) + '?' if near else RULE}"


def _leaves(value: Any, path: str) -> Iterator[Tuple[str, Any]]:
    """Yield (dotted key, value) of everything below an entry, dicts and lists included."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield from _leaves(item, f'{path}.{key}')


def _nearest(word: str, paths: Iterable[str], cutoff: float = 0.6) -> List[str]:
    """Return at most three dotted keys whose last part is closest to the word."""
    last = {}
    for path in paths:
        last.setdefault(path.rsplit('.', 1)[-1], path)
    return [last[close] for close in difflib.get_close_matches(word, list(last), n=3, cutoff=cutoff)]


def _check_entry(node: Any, path: List[str], rest: List[str], key: str, options: Dict[str, Any]) -> None:
    """Follow the dotted key below `path`, whose value is `node`."""
    for part in rest:
        above = '.'.join(path)
        if isinstance(node, (list, tuple)):
            if not part.isdigit() or int(part) >= len(node):
                raise UserError(f'--cfg-options {key}: {above} is a list of {len(node)} entries, from {above}.0 on')
            node = node[int(part)]
        elif isinstance(node, dict):
            if part not in node and part != '_delete_':
                _check_new(node, above, part, key, options)
            node = node.get(part, {})
        elif node is not None:
            raise UserError(f'--cfg-options {key}: {above} is {node!r}, which has no entries')
        else:
            return
        path = [*path, part]


def _check_new(node: Dict[str, Any], above: str, part: str, key: str, options: Dict[str, Any]) -> None:
    """Refuse a new key that the reader of the dict does not accept; print a note if the reader is unknown."""
    # The type can be one of the options, as in `init_cfg.type=Pretrained init_cfg.checkpoint=FILE`.
    kind = options.get(f'{above}.type', node.get('type'))
    if part == 'type' or above == 'default_hooks' and (f'{above}.{part}.type' in options
                                                       or 'type' in _as_dict(options.get(key))):
        return                                    # the class itself checks its arguments
    accepted = _accepted(node, kind, above)
    if accepted.names is not None:
        if part not in accepted.names:
            near = difflib.get_close_matches(part, sorted({*accepted.names, *node}), n=3, cutoff=0.5)
            raise UserError(f"--cfg-options {key}: {above} accepts no {part!r}"
                            f"{'; did you mean ' + ', '.join(near) + '?' if near else ''} ({RULE})")
        return
    if accepted.known:
        return
    near = difflib.get_close_matches(part, list(node), n=1, cutoff=0.75)
    if near:
        raise UserError(f'--cfg-options {key}: {above} has no {part!r}; did you mean {near[0]!r}? (an entry of that '
                        'name can be added in a config file)')
    print(f'--cfg-options {key}: the key is not in the config and is added; it may have no effect',
          file=sys.stderr)


def _as_dict(value: Any) -> Dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _accepted(node: Dict[str, Any], kind: Any, above: str) -> Accepted:
    """Return the keys that the reader of the dict at the path `above` accepts."""
    for matches, accepted in _READERS:
        if matches(above):
            return accepted(node, kind)
    return _UNKNOWN if kind is None else _of_types(kind)


def parameters(reader: Callable[..., Any]) -> Optional[Set[str]]:
    """Return the argument names of a function or constructor, or None if it accepts **kwargs."""
    if inspect.isclass(reader):
        owner = next((base for base in reader.__mro__ if '__init__' in base.__dict__), object)
        if owner is object:
            return set()
        reader = owner.__init__
    try:
        found = inspect.signature(reader).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in found.values()):
        return None
    return {name for name in found if name != 'self'}


def _registered(kind: Any) -> List[Any]:
    """Return the classes or functions that any registry holds under this name."""
    if not isinstance(kind, str):
        return [kind] if callable(kind) else []
    from mmengine import registry
    found = []
    for name in _REGISTRIES:
        try:
            with getattr(registry, name).switch_scope_and_registry(None) as own:        # of the default scope
                found.append(own.get(kind))
        except Exception:                         # the types of a library that cannot be imported are unknown
            continue
    return [each for each in found if each is not None]


def _of_types(kind: Any, *more: str) -> Accepted:
    """Return the arguments of the classes with this name, and `more`."""
    classes = _registered(kind)
    if not classes:
        return _UNKNOWN
    names: Set[str] = {'type', '_scope_', *more}
    for each in classes:
        arguments = parameters(each)
        if arguments is None:
            return _ANY
        names |= arguments
    return Accepted(names)


def _loop(node: Dict[str, Any], kind: Any) -> Accepted:
    from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
    if kind is not None:
        return _of_types(kind, 'by_epoch')
    loop = EpochBasedTrainLoop if node.get('by_epoch', True) else IterBasedTrainLoop
    return Accepted({*parameters(loop), 'by_epoch', 'type'} - {'runner', 'dataloader'})


def _evaluation_loop(node: Dict[str, Any], kind: Any) -> Accepted:
    from mmengine.runner import ValLoop
    if kind is not None:
        return _of_types(kind)
    return Accepted({*parameters(ValLoop), 'type'} - {'runner', 'dataloader', 'evaluator'})


def _dataloader(node: Dict[str, Any], kind: Any) -> Accepted:
    from torch.utils.data import DataLoader
    return Accepted({*parameters(DataLoader), 'num_batch_per_epoch'})


def _optim_wrapper(node: Dict[str, Any], kind: Any) -> Accepted:
    from mmengine.optim import OptimWrapper
    names = {*parameters(OptimWrapper), 'type', 'constructor', 'paramwise_cfg', 'dtype', 'loss_scale', 'use_fsdp'}
    return Accepted(names | (_of_types(kind).names or set() if kind else set()))


def _clip_grad(node: Dict[str, Any], kind: Any) -> Accepted:
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_
    return Accepted({*parameters(clip_grad_value_ if kind == 'value' else clip_grad_norm_), 'type'} - {'parameters'})


def _optimizer(node: Dict[str, Any], kind: Any) -> Accepted:
    return _of_types(kind) if kind else _ANY                 # timm's factory refuses unknown arguments


def _randomness(node: Dict[str, Any], kind: Any) -> Accepted:
    from mmengine.runner import Runner
    return Accepted(parameters(Runner.set_randomness))


def _hook(node: Dict[str, Any], kind: Any) -> Accepted:
    if kind is None:
        return _UNKNOWN
    from mmengine.hooks import CheckpointHook
    from mmengine.runner import Runner
    if any(inspect.isclass(each) and issubclass(each, CheckpointHook) for each in _registered(kind)):
        # CheckpointHook passes other arguments to save_checkpoint, after an epoch.
        return Accepted({*_named_parameters(CheckpointHook), *_named_parameters(Runner.save_checkpoint), 'type',
                         'priority'})
    return _of_types(kind, 'priority')


def _scheduler(node: Dict[str, Any], kind: Any) -> Accepted:
    """MMEngine's schedulers accept any argument and pass it to the class that computes the values."""
    classes = [each for each in _registered(kind) if inspect.isclass(each)] if kind else []
    if not classes:
        return _UNKNOWN
    names = {'type', '_scope_', 'convert_to_iter_based'}
    for base in (base for each in classes for base in each.__mro__ if '__init__' in vars(base)):
        names |= _named_parameters(base)
    return Accepted(names - {'optimizer', 'param_name'})


def _named_parameters(reader: Callable[..., Any]) -> Set[str]:
    """Return the argument names of a function or constructor, ignoring **kwargs."""
    found = inspect.signature(reader.__init__ if inspect.isclass(reader) else reader).parameters.values()
    return {p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - {'self'}


def _transform(node: Dict[str, Any], kind: Any) -> Accepted:
    from timm.data import create_transform
    return Accepted(parameters(create_transform)) if kind is None else _of_types(kind)


def _backbone_init(node: Dict[str, Any], kind: Any) -> Accepted:
    """The package's backbones read `weights` beside the arguments of MMEngine's initializer."""
    if kind is None:
        return _UNKNOWN
    return _of_types(kind, 'weights') if kind == 'Pretrained' else _of_types(kind)


def _compile(node: Dict[str, Any], kind: Any) -> Accepted:
    from torch import compile as compile_
    return Accepted({*_named_parameters(compile_)} - {'model'})


def _fixed(*names: str) -> Callable[[Dict[str, Any], Any], Accepted]:
    return lambda node, kind: Accepted(set(names))


def _named(*paths: str) -> Callable[[str], bool]:
    return lambda above: above in paths


def _in_list(*lists: str) -> Callable[[str], bool]:
    return lambda above: above.rsplit('.', 1)[0] in lists and above.count('.') == 1


# (predicate of the path of a dict; function that returns what its reader accepts).
_READERS: Tuple[Tuple[Callable[[str], bool], Callable[[Dict[str, Any], Any], Accepted]], ...] = (
    (_named('train_cfg'), _loop),
    (_named('val_cfg', 'test_cfg'), _evaluation_loop),
    (_named('train_dataloader', 'val_dataloader', 'test_dataloader'), _dataloader),
    (_named('optim_wrapper'), _optim_wrapper),
    (_named('optim_wrapper.clip_grad'), _clip_grad),
    (_named('optim_wrapper.optimizer'), _optimizer),
    (lambda above: re.fullmatch(r'param_scheduler(\.\d+)?', above) is not None, _scheduler),
    (_named('randomness'), _randomness),
    (_named('default_hooks'), _fixed(*_HOOKS)),
    (_in_list('default_hooks', 'custom_hooks'), _hook),
    (_named('auto_scale_lr'), _fixed('enable', 'base_batch_size')),
    (_named('model.distillation.teacher'), _fixed('name', 'weights', 'pretrained', 'mean', 'std')),
    (_named('model.bce'), _fixed('target_threshold', 'sum_classes')),
    (_named('compile'), _compile),
    (_named('env_cfg'), _fixed('cudnn_benchmark', 'mp_cfg', 'dist_cfg', 'resource_limit')),
    (_named('env_cfg.mp_cfg'), _fixed('mp_start_method', 'opencv_num_threads')),
    (lambda above: above.endswith('_dataloader.dataset.transform'), _transform),
    (lambda above: above.endswith('backbone.init_cfg'), _backbone_init),
)
