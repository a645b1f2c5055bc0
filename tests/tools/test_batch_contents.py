"""Which items a message about a batch names."""
from types import SimpleNamespace

import pytest
from mmengine.dataset import DefaultSampler, InfiniteSampler
from torch.utils.data import DataLoader

from subquad.tools.engine.finite import batch_contents


@pytest.mark.parametrize('kind', [InfiniteSampler, DefaultSampler])
@pytest.mark.parametrize('step', [0, 3])
def test_the_items_are_those_of_the_batch(kind, step):
    data = list(range(100))
    loader = DataLoader(data, 2, sampler=kind(data, shuffle=True, seed=5))
    batches = iter(loader)
    batch = [next(batches) for _ in range(step + 1)][-1]
    text = batch_contents(SimpleNamespace(train_dataloader=loader, iter=step), step, batch)
    assert text == f"the batch holds the items {', '.join(map(str, batch.tolist()))} of the training data"
