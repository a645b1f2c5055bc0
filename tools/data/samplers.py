"""A sampler of timm for configs."""
from collections.abc import Sized

from mmengine.dist import get_dist_info
from mmengine.registry import DATA_SAMPLERS
from timm.data.distributed_sampler import RepeatAugSampler


@DATA_SAMPLERS.register_module()
class RepeatedAugmentationSampler(RepeatAugSampler):
    """Repeated augmentation: an epoch shows a part of the images, each of them `num_repeats` times.

    The repetitions of an image go to different processes if there are several. An epoch has as many samples as the data
    set has images, rounded down to a multiple of 256 if there are more than 256. The order is drawn from
    (seed, epoch), so a resumed training continues with the order of an uninterrupted one.

    Args:
        dataset: The data set.
        num_repeats: How often an image is shown in its epoch.
        shuffle: Shuffle the images in each epoch.
        seed: Seed of the order; MMEngine gives that of the run, the same in all processes.
    """

    def __init__(self, dataset: Sized, num_repeats: int = 3, shuffle: bool = True, seed: int = 0):
        if num_repeats < 1:
            raise ValueError(f'num_repeats must be at least 1, got {num_repeats}')
        rank, processes = get_dist_info()
        super().__init__(dataset, num_replicas=processes, rank=rank, shuffle=shuffle, num_repeats=num_repeats)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; MMEngine calls it before each."""
        super().set_epoch(self.seed + epoch)
