"""Samplers for configs: repeated augmentation, and batches of images of other sizes."""
from collections.abc import Sized
from itertools import chain, islice, repeat
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np
from mmengine.dist import get_dist_info
from mmengine.registry import DATA_SAMPLERS
from timm.data.distributed_sampler import RepeatAugSampler


@DATA_SAMPLERS.register_module()
class RepeatedAugmentationSampler(RepeatAugSampler):
    """Repeated augmentation: an epoch shows a part of the images, each of them `num_repeats` times.

    The repetitions of an image follow each other in the order from which processes take turns: with at least
    `num_repeats` processes, each repetition is in another one. An epoch has as many samples as the data set has images,
    rounded down to a multiple of 256 if there are more than 256. The order is drawn from
    (seed, epoch), so a resumed training continues with the order of an uninterrupted one.

    Args:
        dataset: The data set.
        num_repeats: How often an image is shown in its epoch.
        shuffle: Shuffle the images in each epoch.
        seed: Seed of the order; MMEngine gives that of the run, the same in all processes.
    """

    def __init__(self, dataset: Sized, num_repeats: int = 3, shuffle: bool = True, seed: int = 0):
        rank, processes = get_dist_info()
        super().__init__(dataset, num_replicas=processes, rank=rank, shuffle=shuffle, num_repeats=num_repeats)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; MMEngine calls it before each."""
        super().set_epoch(int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0]))


@DATA_SAMPLERS.register_module()
class VariableBatchSampler:
    """Batches of images of other sizes, with the fewer images the larger they are, as MobileViT is trained.

    Every batch draws one of the sizes, the same in all processes. A batch of images of s x s pixels has
    batch_size * (size / s)^2 of them, rounded down to a multiple (Mehta & Rastegari, "MobileViT", 2021, arXiv
    2110.02178, section 3.3). An epoch has as many batches as one with images of a single size, so it can leave images
    out, or show some of them again. Sizes are drawn from (seed, epoch) of the sampler.

    Use it as batch_sampler of a train_dataloader with drop_last=False.

    Args:
        sampler: The sampler of single images; MMEngine gives it.
        batch_size: Number of images of size x size; MMEngine gives it.
        sizes: The sides of the images in pixels.
        size: The side to which `batch_size` belongs; None for the largest, as in the paper.
        multiple: Batches have a multiple of this number of images, at least one multiple; 2 suits mixup.
    """

    def __init__(self, sampler: Sized, batch_size: int, sizes: Sequence[int] = (160, 192, 256, 288, 320),
                 size: Optional[int] = None, multiple: int = 2):
        if not 1 <= multiple <= batch_size:
            raise ValueError(f'multiple must be from 1 to the batch_size of {batch_size}, got {multiple}')
        self.sampler, self.batch_size, self.sizes, self.multiple = sampler, batch_size, list(sizes), multiple
        self.size = size or max(sizes)

    def images(self, side: int) -> int:
        """Return the number of images of side x side pixels in a batch."""
        count = self.batch_size * self.size ** 2 // side ** 2
        return max(self.multiple, count // self.multiple * self.multiple)

    def __len__(self) -> int:
        return max(1, len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[List[Tuple[int, int]]]:
        sides = np.random.default_rng([self.sampler.seed, self.sampler.epoch]).choice(self.sizes, len(self)).tolist()
        indices = chain.from_iterable(repeat(self.sampler))              # again from the start if there are too few
        for side in sides:
            yield [(index, side) for index in islice(indices, self.images(side))]
