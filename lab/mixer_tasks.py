"""The tasks, mixers and seeds of the comparison of mixers.

A cell is a task, a mixer and a seed. The config of the task is the recipe: only the mixer and the seed change.
"""
from typing import Dict, NamedTuple, Sequence

from subquad.backbones.mixers.choices import MIXERS, find_mixer
from subquad.tools.common.cli import UserError, nearest

SEEDS = (0, 1, 2)
# The mixers that are compared by default. Any other name that `mixers=` of the skeleton takes can be given.
COMPARED = ('identity', 'depthwise', 'attention', 'polyline', 'polyline-multiplicative', 'separable', 'tree',
            'tree-symmetric', 'tree-skew', 'eos', 'eos:tnl', 'eos:hgrn', 'eos:1-10-1-0', 's5')
# Options of the generated shapes.
SHAPES = dict(train=240, val=80, size=[96, 96], seed=0)


class Task(NamedTuple):
    """A task of the comparison.

    Attributes:
        config: name of its config.
        metric: name of the metric that is compared.
        unit: the metric in words.
        scale: factor that makes the metric a percentage.
        dense: whether the task trains a detector or segmenter on the generated shapes.
    """

    config: str
    metric: str = 'accuracy/top1'
    unit: str = 'top-1, %'
    scale: float = 1.
    dense: bool = False

    @property
    def key(self) -> str:
        """The entry of the config that names the mixer."""
        return 'model.backbone.mixers' if self.dense else 'model.mixers'


TASKS: Dict[str, Task] = {
    'digits': Task('mixers_digits'),
    'mnist5k': Task('mixers_mnist5k'),
    'detection': Task('mixers_detection', 'coco/bbox_mAP_50', 'box AP50, %', 100., True),
    'segmentation': Task('mixers_segmentation', 'mIoU', 'mIoU, %', dense=True),
    'listops': Task('mixers_listops'),
    'pathfinder': Task('mixers_pathfinder'),
    'copy': Task('mixers_copy'),
}


class Cell(NamedTuple):
    """One training: names of a task and a mixer, and a seed."""

    task: str
    mixer: str
    seed: int


def check_names(tasks: Sequence[str], mixers: Sequence[str], seeds: Sequence[int]) -> None:
    """Check what a command line names."""
    for task in tasks:
        if task not in TASKS:
            raise UserError(f"unknown task {task!r}{nearest(task, list(TASKS))} (allowed: {', '.join(TASKS)})")
    for mixer in mixers:
        if find_mixer(mixer) is None:
            known = list(dict.fromkeys([*MIXERS, *COMPARED]))
            raise UserError(f"unknown mixer {mixer!r}{nearest(mixer, known)} (allowed: {', '.join(MIXERS)}, and 'eos:' "
                            "with a preset or code of EosMixer, such as eos:1-1-1-4)")
    for seed in seeds:
        if not 0 <= seed < 2 ** 32:
            raise UserError(f'--seeds must be from 0 to 4294967295, got {seed}')
