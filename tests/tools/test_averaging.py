"""Averages of weights."""
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config

from subquad.tools.engine.training.averaging import ModelEMAHook


def test_shared_weights_are_averaged_once():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in 'ab'})
    model['a'].weight = model['b'].weight
    runner = SimpleNamespace(model=model, epoch=0, iter=0, max_iters=1,
                             optim_wrapper=SimpleNamespace(should_update=lambda: True),
                             cfg=Config(dict(train_dataloader=dict(batch_size=1), optim_wrapper=dict())))
    hook = ModelEMAHook(decay=0.9)
    hook.before_run(runner)
    hook.before_train(runner)
    start = model['a'].weight.item()
    torch.nn.init.constant_(model['a'].weight, start + 1)
    hook.after_train_iter(runner, 0)
    assert hook.ema_model.module['b'].weight.item() == pytest.approx(start + 0.1)
