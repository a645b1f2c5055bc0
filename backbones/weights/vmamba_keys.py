"""Rename VMamba weights between the names of the authors' files and the names of this package, in both directions.

The authors join the four paths of a scan with its channels in A_logs (4 E, N) and Ds (4 E), and not in x_proj_weight
(4, R + 2 N, E), whereas this package has A_log (4, E, N), D (4, E) and x_proj.weight (4 (R + 2 N), E). Old files of the
first version have other names, and some files hold linear layers as 1 x 1 convolutions.
"""
import re
from typing import Any, Dict, Optional

from torch import Tensor

from .errors import WeightsError
from .key_table import KeyTable

PATHS = 4
_MIXER = (('x_proj_weight', 'scan.x_proj.weight'), ('dt_projs_weight', 'scan.dt_proj.weight'),
          ('dt_projs_bias', 'scan.dt_bias'), ('A_logs', 'scan.A_log'), ('Ds', 'scan.D'), ('in_proj', 'in_proj'),
          ('conv2d', 'conv'), ('out_norm', 'norm'), ('out_proj', 'out_proj'))
_ROWS = (
    *((f'layers.{{s}}.blocks.{{b}}.{theirs}', f'stages.{{s}}.blocks.{{b}}.{ours}') for theirs, ours in (
        *((f'op.{theirs}', f'mixer.{ours}') for theirs, ours in _MIXER),
        ('norm', 'norm1'), ('norm2', 'norm2'), ('mlp.fc1', 'mlp.fc1'), ('mlp.fc2', 'mlp.fc2'))),
    *((f'patch_embed.{n}', f'stem.{name}') for n, name in ((0, 'conv1'), (2, 'norm1'), (5, 'conv2'), (7, 'norm2'))),
    ('classifier.norm', 'head.norm'),
    ('classifier.head', 'head.fc'),
    ('outnorm{s}', 'output_norms.{s}'),
    # The names of old files.
    *((f'layers.{{s}}.blocks.{{b}}.self_attention.{theirs}', f'stages.{{s}}.blocks.{{b}}.mixer.{ours}')
      for theirs, ours in _MIXER),
    ('layers.{s}.blocks.{b}.ln_1', 'stages.{s}.blocks.{b}.norm1'),
    ('patch_embed.proj', 'stem.conv1'),
    ('patch_embed.norm', 'stem.norm1'),
    ('norm', 'head.norm'),
    ('head', 'head.fc'),
)
_MERGING = tuple((f'layers.{{s}}.downsample.{name}', f'stages.{{s+1}}.downsample.{name}')
                 for name in ('reduction', 'norm'))
_CONVOLUTION = (('layers.{s}.downsample.1', 'stages.{s+1}.downsample.conv'),
                ('layers.{s}.downsample.3', 'stages.{s+1}.downsample.norm'))
TABLE, VANILLA_TABLE = KeyTable((*_ROWS, *_CONVOLUTION, *_MERGING)), KeyTable((*_ROWS, *_MERGING))
_BLOCK = re.compile(r'stages\.(\d{1,4})\.blocks\.(\d{1,4})\.')


def is_published(weights: Dict[str, Any]) -> bool:
    """True if the keys are those of the authors' network."""
    return any(key.endswith('.A_logs') for key in weights)


def to_our_keys(weights: Dict[str, Any]) -> Dict[str, Any]:
    """Rename the weights of an authors' network to this package's keys.

    Args:
        weights: the state dict of a network. Weights that already have this package's keys come back unchanged.

    Returns:
        Key -> tensor. Unknown keys and unexpected shapes stay as they are, so that the loader reports them.
    """
    if not is_published(weights):
        return weights
    return {TABLE.to_ours(key) or key: _to_our_shape(key, value) for key, value in weights.items()}


def _to_our_shape(key: str, x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if key.endswith(('.A_logs', '.Ds')) and x.ndim and len(x) and len(x) % PATHS == 0:
        return x.unflatten(0, (PATHS, -1))
    if key.endswith('.x_proj_weight') and x.ndim == 3:
        return x.flatten(0, 1)
    return x.flatten(1) if x.ndim == 4 and x.shape[2:] == (1, 1) else x


def to_published_keys(weights: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Rename the weights of this package's VMamba to the names of the authors' files; the inverse of `to_our_keys`.

    Args:
        weights: the state dict of a classifier or of a dense backbone.

    Returns:
        Key -> tensor, with the authors' shapes.

    Raises:
        WeightsError: the authors' network has no such weight.
    """
    vanilla = any(key.endswith('.reduction.weight') for key in weights)
    names = (VANILLA_TABLE if vanilla else TABLE).all_to_theirs(weights, "the authors' VMamba")
    return {names[key]: _to_their_shape(key, value) for key, value in weights.items()}


def _to_their_shape(key: str, x: Tensor) -> Tensor:
    if key.endswith(('.A_log', '.D')):
        return x.flatten(0, 1)
    return x.unflatten(0, (PATHS, -1)) if key.endswith('.x_proj.weight') else x


def network_of(weights: Dict[str, Any], stages: int) -> Optional[Dict[str, Any]]:
    """Return the options of the network that weights with this package's keys show.

    Args:
        weights: name -> tensor.
        stages: the number of stages to look at, from the first.

    Returns:
        `dims`, `depths`, `ssm_ratio` and `vanilla`, or None if a stage is incomplete.
    """
    depths: Dict[int, int] = {}
    for stage, block in (map(int, found.groups()) for found in map(_BLOCK.match, weights) if found):
        depths[stage] = max(depths.get(stage, 0), block + 1)
    projections = [weights.get(f'stages.{stage}.blocks.0.mixer.out_proj.weight') for stage in range(stages)]
    rates = weights.get('stages.0.blocks.0.mixer.scan.A_log')
    if not all(isinstance(x, Tensor) and x.ndim == 2 and len(x) for x in projections) or not (
            isinstance(rates, Tensor) and rates.ndim == 3):
        return None
    return dict(dims=tuple(len(x) for x in projections), depths=tuple(depths[stage] for stage in range(stages)),
                ssm_ratio=projections[0].shape[1] / len(projections[0]), vanilla=rates.shape[2] > 1)


def check_network(weights: Dict[str, Any], own: Dict[str, Tensor], stages: int,
                  archs: Dict[str, Dict[str, Any]]) -> None:
    """Check that weights are of a network's variant.

    Args:
        weights: the weights of a file, with this package's keys.
        own: the state dict of the network.
        stages: the number of its stages.
        archs: the variants by name.

    Raises:
        WeightsError: they are of another variant; the message names it.
    """
    theirs, ours = network_of(weights, stages), network_of(own, stages)
    if theirs is None or ours is None or theirs == ours:
        return
    names = [f'vmamba_{name}' for name, arch in archs.items() if name != 'test' and theirs == dict(
        dims=arch['dims'][:stages], depths=arch['depths'][:stages], ssm_ratio=arch['ssm_ratio'],
        vanilla=arch.get('vanilla', False))]
    advice = f"build {' or '.join(names)}" if names else 'no published variant has these'
    raise WeightsError(f'the file is of a VMamba with {_options(theirs)}, and this model has {_options(ours)}: '
                       f'{advice}')


def _options(network: Dict[str, Any]) -> str:
    return (f"{'vanilla=True, ' * network['vanilla']}ssm_ratio={network['ssm_ratio']:g}, depths={network['depths']} "
            f"and dims={network['dims']}")
