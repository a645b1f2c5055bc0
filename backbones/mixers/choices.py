"""The token mixers that a stage of the skeleton can take by name, for hybrids and comparisons (`mixers=`)."""
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from torch import nn

from ..options import Option
from .depthwise import DepthwiseMixer
from .eos import EosMixer
from .eos_codes import parse
from .polyline import PolylineMixer
from .separable import SeparableMixer
from .tree import TreeMixer

# Called as build(stage=0..3, block=0.., dim=..., num_heads=..., device=..., dtype=...).
Build = Callable[..., nn.Module]
Names = Union[None, str, Sequence[Optional[str]]]


def _polyline(**options: Any) -> Build:
    return lambda stage, block, dim, num_heads, **dd: PolylineMixer(dim, num_heads, **options, **dd)


def _tree(parametrization: str) -> Build:
    """Return a function that builds trees on a grid that is shifted in every second block, as in Myo."""
    return lambda stage, block, dim, num_heads, **dd: TreeMixer(
        dim, num_heads, parametrization, shift_grid=block % 2 == 1, **dd)


def _eos(mixer: str) -> Build:
    return lambda stage, block, dim, num_heads, **dd: EosMixer(dim, num_heads, mixer, **dd)


# Name -> function that builds the mixer with its default options. 'attention' is softmax attention with the
# projections, rotary embedding and LePE of PPMA's layer, without a decay mask.
MIXERS: Dict[str, Build] = {
    'polyline': _polyline(),
    'polyline-multiplicative': _polyline(mask_mode='multiplicative'),
    'polyline-crisscross': _polyline(attention='crisscross'),
    'polyline-linear': _polyline(attention='linear'),
    'separable': lambda stage, block, dim, num_heads, **dd: SeparableMixer(dim, **dd),
    'tree': _tree('laplacian'),
    'tree-symmetric': _tree('symmetric'),
    'tree-skew': _tree('skew'),
    'eos': _eos('gla'),
    's5': _eos('s5'),
    'attention': _polyline(paths='none'),
    'depthwise': lambda stage, block, dim, num_heads, **dd: DepthwiseMixer(dim, **dd),
    'identity': lambda stage, block, dim, num_heads, **dd: nn.Identity(),
}
_EOS_PREFIX = 'eos:'


def find_mixer(name: Any) -> Optional[Build]:
    """Return the function that builds the mixer of a name, or None if there is no such mixer.

    Args:
        name: a name of `MIXERS`, or 'eos:' followed by a preset or code of `EosMixer`, such as 'eos:1-1-1-4'.
    """
    if not isinstance(name, str):
        return None
    if not name.startswith(_EOS_PREFIX):
        return MIXERS.get(name)
    try:
        parse(name.removeprefix(_EOS_PREFIX))
    except ValueError:
        return None
    return _eos(name.removeprefix(_EOS_PREFIX))


def mixer_name() -> Option:
    """The name of a mixer."""
    allowed = ', '.join(map(repr, MIXERS))
    return Option(f"one of {allowed} or 'eos:' with a preset or code of EosMixer", lambda name: bool(find_mixer(name)))


def attention_blocks(depth: int, share: float) -> Sequence[int]:
    """Return the blocks of a stage that use attention: the share of its blocks, spread evenly, and the last one first.

    Args:
        depth: number of blocks of the stage.
        share: the share, 0 to 1. A half block counts as one.
    """
    count = int(depth * share + 0.5)
    return [(n + 1) * depth // count - 1 for n in range(count)]


def block_mixers(mixers: Names, attention_share: float, depths: Sequence[int]) -> List[List[Optional[str]]]:
    """Return the names of the mixers of each stage's blocks; None is the family's own.

    Args:
        mixers: the name of a mixer, or one for each stage; None keeps the family's own.
        attention_share: the share of the blocks of each stage that use 'attention' instead.
        depths: number of blocks of each stage.
    """
    stages = [mixers] * len(depths) if mixers is None or isinstance(mixers, str) else mixers
    found = [[name] * depth for name, depth in zip(stages, depths)]
    for names in found:
        for block in attention_blocks(len(names), attention_share):
            names[block] = 'attention'
    return found


def warn_of_unused(mixers: Names, attention_share: float, depths: Sequence[int], options: Dict[str, Any]) -> None:
    """Warn of values that no block of a hybrid uses.

    Args:
        mixers, attention_share, depths: see `block_mixers`.
        options: values of the options of the family's own mixer. Lists with a value for each stage do not count,
            because the tables of architectures have them.
    """
    names = block_mixers(mixers, attention_share, depths)
    if isinstance(mixers, str):
        unused: Dict[str, Any] = {} if any(mixers in stage for stage in names) else {'mixers': mixers}
    else:
        unused = {f'mixers[{n}]': name for n, (name, stage) in enumerate(zip(mixers or (), names))
                  if name is not None and name not in stage}
    if attention_share and names == block_mixers(mixers, 0, depths):
        unused['attention_share'] = attention_share
    if not any(None in stage for stage in names):
        unused.update((name, value) for name, value in options.items() if not isinstance(value, (list, tuple)))
    if unused:
        given = ', '.join(f'{name}={value!r}' for name, value in unused.items())
        warnings.warn(f'{given} without effect: mixers={mixers!r} and attention_share={attention_share!r} leave no '
                      f"such block in stages of {', '.join(map(str, depths))} blocks", stacklevel=2)
