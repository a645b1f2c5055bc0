"""One training of the comparison of mixers: its config, the digest of its recipe, its result and its cost.

The digest is part of each record, so that results of different recipes are never mixed.
"""
import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from mmengine.registry import MODELS

from subquad.tools.common.cli import UserError, one_line
from subquad.tools.common.output import dumps
from subquad.tools.data.shapes_files import make_shapes
from subquad.tools.engine.classification.weight_files import WRAPPER_ARGUMENTS
from subquad.tools.engine.config import config_with_options, is_classifier, scale_schedule
from subquad.tools.engine.counting.counts import three_counts
from subquad.tools.engine.zoo import create

from .mixer_tasks import COMPARED, SEEDS, SHAPES, TASKS, Cell
from .short_training import train_and_test, without_validation

CONFIGS = Path(__file__).resolve().parent / 'configs'


def cell_config(cell: Cell, options: Dict[str, Any], shapes: Optional[Path] = None) -> Any:
    """Return the MMEngine config of a cell.

    Args:
        cell: the cell.
        options: options of all cells, by dotted key of the config; 'epochs' scales the schedule to this number.
        shapes: folder of the generated shapes, for detection and segmentation.
    """
    task = TASKS[cell.task]
    for name, flag in ((task.key, '--mixers'), ('randomness.seed', '--seeds')):
        if name in options:
            raise UserError(f'--cfg-options {name} is what the comparison varies: give {flag}')
    changes = {key: value for key, value in options.items() if key != 'epochs'}
    config = config_with_options(argparse.Namespace(
        config=str(CONFIGS / f'{task.config}.py'), strict=False, model=None,
        cfg_options={**changes, task.key: cell.mixer, 'randomness.seed': cell.seed},
        data=None if shapes is None else str(shapes)))
    if 'epochs' in options:
        scale_schedule(config, options['epochs'])
    without_validation(config)
    return config


def recipe(task: str, options: Dict[str, Any]) -> str:
    """Return the digest of everything that the cells of a task share, 12 hexadecimal digits."""
    config = cell_config(Cell(task, COMPARED[0], SEEDS[0]), options).to_dict()
    config.pop('custom_imports', None)                              # names of modules are no part of it
    shared = dumps([config, SHAPES if TASKS[task].dense else None, TASKS[task].metric], sort_keys=True, default=repr)
    return hashlib.sha256(shared.encode()).hexdigest()[:12]


def train_cell(cell: Cell, options: Dict[str, Any]) -> Dict[str, Any]:
    """Train a cell in this process.

    Args:
        cell: the cell.
        options: as of `cell_config`.

    Returns:
        score (the compared metric in percent; 0 for a detector that finds nothing, which has no metrics), metrics (all
        of them), parameters and macs of the network for one input (of a detector or segmenter: of the backbone), and
        step_ms, peak_mb, steps, seconds and train_loss as in `train_and_test`.
    """
    task = TASKS[cell.task]
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / 'shapes' if task.dense else None
        if images:
            make_shapes(images, SHAPES)
        config = cell_config(cell, options, images)
        shapes: List[Tuple[Tuple[int, ...], torch.dtype]] = []
        found = train_and_test(config, lambda inputs: shapes.append((tuple(inputs[0].shape), inputs[0].dtype)))
        result = {name: found.pop(name) for name in ('train_loss', 'steps', 'seconds', 'step_ms', 'peak_mb')}
        score = 0. if cell.task == 'detection' and not found else task.scale * found[task.metric]
        return {'score': score, 'metrics': found, **_counts(config, *shapes[0]), **result}


def _counts(config: Any, shape: Tuple[int, ...], dtype: torch.dtype) -> Dict[str, Optional[int]]:
    """Count the parameters and the MACs of the network for one input on the meta device."""
    try:
        if is_classifier(config):
            options = {key: value for key, value in config.model.to_dict().items() if key not in WRAPPER_ARGUMENTS}
            network = create(config.model.name, device='meta', **options)
        else:
            with torch.device('meta'):
                network = MODELS.build(config.model.backbone.to_dict())
        dtype = torch.float32 if dtype == torch.uint8 else dtype        # a preprocessor converts the images
        counts = three_counts(network, lambda n: network(torch.empty(n, *shape, dtype=dtype, device='meta')))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f'the network cannot be counted: {one_line(error)}') from error
    return dict(parameters=sum(p.numel() for p in network.parameters()), macs=counts['macs'])
