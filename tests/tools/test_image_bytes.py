"""Images that are copied to the device as bytes and normalized there."""
import random

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from subquad.tools.engine.classification.model import TimmClassifier
from subquad.tools.engine.classification.pixels import send_bytes
from subquad.tools.engine.classification.task import build_data
from subquad.tools.engine.config import load


@pytest.mark.parametrize('mix', [False, True])
def test_images_as_bytes_give_the_same_batches(mix, images):
    """Also with other statistics in validation; images that are erased after their normalization stay floats."""
    def batches(as_bytes, **transform):
        config = load('ppma-tiny_folder')
        for part in ('train', 'val'):
            config[f'{part}_dataloader'].dataset.update(root=f'{images}/{part}')
        config.train_dataloader.dataset.transform.update(input_size=(3, 32, 32), **transform)
        config.val_dataloader.dataset.transform.update(input_size=(3, 32, 32), mean=(0.1, 0.2, 0.3))
        model = TimmClassifier('test_vit', num_classes=2,
                               data_preprocessor=dict(type='MixupPreprocessor') if mix else None)
        keys, loaders = list(model.state_dict()), build_data(config, ('train', 'val'))[0]
        if as_bytes:
            send_bytes(model, loaders)
        assert list(model.state_dict()) == keys
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        found = []
        for part in ('train', 'val'):
            batch = default_collate([loaders[f'{part}_dataloader']['dataset'][n] for n in range(4)])
            found += [batch['inputs'].dtype, model.data_preprocessor(batch, part == 'train')['inputs']]
        return found
    for transform, dtype in ((dict(re_prob=0.), torch.uint8), (dict(re_prob=1., re_mode='pixel'), torch.float32)):
        plain, found = batches(False, **transform), batches(True, **transform)
        assert (plain[0], found[0], found[2]) == (torch.float32, dtype, torch.uint8)
        assert torch.equal(found[1], plain[1]) and torch.equal(found[3], plain[3])
