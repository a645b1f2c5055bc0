"""The recipes against tables of the authors' values: learning rates of all epochs, weight decay, augmentation.

`recipes.json` was written from the authors' code without this package. PPMA: DeiT's training loop around timm's
CosineLRScheduler, whose values the authors' logs hold. MobileViTv2: cvnets' CosineScheduler, with its 1,252 steps an
epoch and its 8 decimals, and torchvision's RandAugment at magnitude 9 of 30. Parameters were counted from the widths of
the networks.
"""
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import PARAM_SCHEDULERS
from pairwise import slow
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import RandAugment as TorchvisionRandAugment

from subquad.tools.data.image_sets import build_transform
from subquad.tools.engine.classification.task import build_model
from subquad.tools.engine.config import load, scale_schedule
from subquad.tools.engine.training.runner import build_optimizer

STEPS = ['RandomResizedCropAndInterpolation', 'RandomHorizontalFlip', 'RandAugment', 'NormalizedTensor',
         'RandomErasing']
RECORDED = json.loads((Path(__file__).parents[1] / 'data' / 'recipes.json').read_text())
# Config and, if the recipe is shared by several networks, the name of its learning rates.
RATES = {**{f'ppma-{size}_8xb128-300e_in1k': 'ppma_300e' for size in 'tsb'},
         **{f'mobilevitv2-{width}_8xb128-300e_in1k': f'mobilevitv2-{width}_300e'
            for width in ('050', '075', '100', '125', '150', '175', '200')},
         'mobilevitv2-150_32xb128-80e_in21k': 'mobilevitv2_80e_in21k',
         'mobilevitv2-200_2xb128-50e_in1k-from-in21k': 'mobilevitv2_50e_in1k-from-in21k'}


def _config(name):
    config = load(name)
    processes = int(name.split('_')[1].split('xb')[0])
    images = processes * config.train_dataloader.batch_size
    return config, config.optim_wrapper.optimizer.lr * images / config.auto_scale_lr.base_batch_size


def _rates(config, lr, epochs, length):
    """Return the learning rate of each step of an epoch of `length` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = PARAM_SCHEDULERS.build(dict(config.param_scheduler[0], end=config.train_cfg.max_epochs),
                                       default_args=dict(optimizer=optimizer, epoch_length=length))
    rates = []
    for step in range(epochs * length):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        if not scheduler.by_epoch or not (step + 1) % length:
            scheduler.step()
    return rates


@pytest.mark.parametrize('name, table', RATES.items())
def test_the_learning_rate_of_every_epoch_is_the_authors(name, table):
    config, lr = _config(name)
    expected = RECORDED['learning_rates'][table]
    assert len(expected) == config.train_cfg.max_epochs
    found = _rates(config, lr, len(expected), 4)
    assert found[::4] == pytest.approx(expected, rel=1e-8, abs=6e-9)
    if 'mobilevitv2' not in name or not config.param_scheduler[0].get('warmup'):
        assert found[3::4] == found[::4], 'constant within an epoch'


def test_the_logs_of_the_authors_of_ppma():
    rates = _rates(*_config('ppma-t_8xb128-300e_in1k'), 300, 1)
    logged = {0: 1e-6, 1: 1e-6, 2: 2.008e-4, 4: 6.004e-4, 6: 9.993e-4, 40: 9.593e-4, 200: 2.620e-4, 299: 1.0109e-5}
    assert [rates[epoch] for epoch in logged] == pytest.approx([*logged.values()], rel=1e-4)


def test_the_warm_up_of_mobilevitv2_ends_after_20000_steps():
    config, lr = _config('mobilevitv2-200_8xb128-300e_in1k')
    rates = _rates(config, lr, 17, 1252)
    assert rates[10_000] == pytest.approx((1e-6 + lr) / 2) and rates[19_999] == pytest.approx(lr, rel=1e-4)
    assert rates[20_000] == pytest.approx(0.0002 + 0.0009 * (1 + np.cos(np.pi * 15 / 300)), rel=1e-9)
    assert len({*rates[20_000:20_032]}) == 1 and rates[20_032] < rates[20_031]


def test_a_shorter_training_has_the_same_shape():
    config, lr = _config('ppma-t_8xb128-300e_in1k')
    scale_schedule(config, 100)
    rates = _rates(config, lr, 100, 1)
    assert rates[0] == pytest.approx(1e-6) and rates[2] > 0.99 * lr and rates[99] == pytest.approx(1e-5, rel=0.1)
    config, lr = _config('ppma-t_8xb128-300e_in1k')
    scale_schedule(config, 10)
    assert _rates(config, lr, 10, 1)[0] == lr, 'phases shorter than an epoch are left out'
    config = load('mobilevitv2-200_8xb128-300e_in1k')
    scale_schedule(config, 300)
    assert config.param_scheduler[0].warmup == 20_000 / 1_252


@pytest.mark.parametrize('name', ['ppma-b', 'mobilevitv2-050', *slow(
    *(name for name in RECORDED['weight_decay'] if name not in ('ppma-b', 'mobilevitv2-050')))])
def test_the_weight_decay_of_every_parameter_is_the_authors(name):
    """The 66 factors of LayerScale of PPMA-B have weight decay: they have four dimensions in the authors' network."""
    config = load(f'{name}_8xb128-300e_in1k')
    model = build_model(config, [str(n) for n in range(1000)], training=True)
    groups = build_optimizer(config, model).optimizer.param_groups
    decay = config.optim_wrapper.optimizer.weight_decay
    assert {group['weight_decay'] for group in groups} == {0., decay}
    for kind, value in (('decayed', decay), ('exempt', 0.)):
        sizes = [p.numel() for group in groups for p in group['params'] if group['weight_decay'] == value]
        assert [len(sizes), sum(sizes)] == RECORDED['weight_decay'][name][kind], kind


def _check_shared(steps, config, recorded):
    crop, flip = steps[:2]
    assert [*crop.size] == recorded['crop']['size'] and [*crop.scale] == recorded['crop']['scale']
    assert [*crop.ratio] == pytest.approx(recorded['crop']['ratio'])
    assert crop.interpolation.value == recorded['crop']['interpolation'] and flip.p == recorded['flip']
    mixing = config.model.data_preprocessor
    assert mixing.mixup_alpha == recorded['mixup_alpha'] and mixing.cutmix_alpha == recorded['cutmix_alpha']
    assert config.model.label_smoothing == recorded['label_smoothing']


@pytest.mark.parametrize('size', 'tsb')
def test_the_augmentation_of_ppma(size):
    config, recorded = load(f'ppma-{size}_8xb128-300e_in1k'), RECORDED['augmentation']['ppma']
    steps = build_transform(config.train_dataloader.dataset.transform).transforms
    assert [type(step).__name__ for step in steps] == STEPS
    _check_shared(steps, config, recorded)
    policy, erasing = steps[2], steps[4]
    assert [each.name for each in policy.ops] == recorded['operations'] and policy.num_layers == recorded['drawn']
    assert {(each.prob, each.magnitude, each.magnitude_std, each.magnitude_max) for each in policy.ops} == {
        tuple(recorded[key] for key in ('probability', 'magnitude', 'magnitude_std', 'magnitude_max'))}
    assert erasing.probability == recorded['erasing']['probability'] and erasing.rand_color is False
    assert erasing.per_pixel == (recorded['erasing']['mode'] == 'pixel')


@pytest.mark.parametrize('recipe', [*list(RATES)[3:], 'mobilevitv2-100_8xb128-300e_in1k-multiscale'])
def test_the_augmentation_of_mobilevitv2(recipe):
    config, recorded = load(recipe), RECORDED['augmentation']['mobilevitv2']
    steps = build_transform(config.train_dataloader.dataset.transform).transforms
    assert [type(step).__name__ for step in steps] == STEPS
    _check_shared(steps, config, recorded)
    policy, erasing = steps[2], steps[4]
    assert isinstance(policy, TorchvisionRandAugment) and policy.interpolation == InterpolationMode.BILINEAR
    space = policy._augmentation_space(policy.num_magnitude_bins, (256, 256))
    magnitudes = {key: float(values[policy.magnitude]) if values.ndim else float(values)
                  for key, (values, _) in space.items()}
    assert magnitudes == pytest.approx(recorded['operations'], abs=1e-4) and policy.num_ops == recorded['drawn']
    expected = recorded['erasing']
    assert (erasing.p, [*erasing.scale], [*erasing.ratio], erasing.value) == (
        expected['p'], expected['scale'], expected['ratio'], expected['value'])


@pytest.mark.parametrize('policy', ['rand-m9-mstd0.5-inc1', 'augmix-m9'])
def test_posterize_keeps_at_least_one_bit(policy, monkeypatch):
    """timm asks Pillow for 0 bits at the largest magnitude, which 2 % of the draws with mstd0.5 reach."""
    transform = build_transform(dict(input_size=(3, 32, 32), is_training=True, auto_augment=policy))
    posterize, = [each for step in transform.transforms for each in getattr(step, 'ops', ())
                  if each.name == 'PosterizeIncreasing']
    posterize.magnitude, posterize.prob = 10, 1.
    monkeypatch.setattr(random, 'gauss', lambda mean, std: 10.)
    monkeypatch.setattr(random, 'uniform', lambda low, high: high)
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5)
    assert {*np.unique(posterize(image))} == {0, 128}
