"""Batches of images of several sizes."""
import pytest
import torch
from mmengine.dataset import DefaultSampler
from training_cases import fails, folder_arguments

from subquad.backbones.weights import read_checkpoint
from subquad.tools import train
from subquad.tools.data.samplers import VariableBatchSampler
from subquad.tools.engine.classification.model import TimmClassifier
from subquad.tools.engine.config import find

SIZED = ("train_dataloader = dict(batch_sampler=dict(type='VariableBatchSampler', sizes=[32, 48, 64], size=32))\n"
         "model = dict(data_preprocessor=dict(type='MixupPreprocessor'))\n")


def _config(folder, text=SIZED):
    path = folder / 'sized.py'
    path.write_text(f'_base_ = {str(find("ppma-tiny_folder"))!r}\n{text}')
    return str(path)


def _batches(epoch=0, seed=0, count=4096, batch_size=128, **options):
    sampler = DefaultSampler(range(count), shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    batches = VariableBatchSampler(sampler, batch_size, **options)
    return batches, list(batches)


def test_all_batches_have_about_as_many_pixels():
    batches, found = _batches(size=256)
    assert len(found) == len(batches) == 32
    numbers = {}
    for batch in found:
        side, = {side for _, side in batch}
        numbers.setdefault(side, set()).add(len(batch))
    assert numbers == {160: {326}, 192: {226}, 256: {128}, 288: {100}, 320: {80}}
    assert all(number % 2 == 0 and 0.97 < number * side ** 2 / (128 * 256 ** 2) <= 1
               for side, (number,) in ((side, tuple(each)) for side, each in numbers.items()))
    assert _batches(sizes=(64, 512), batch_size=2, size=64)[0].images(512) == 2, 'never empty'
    assert _batches()[0].images(320) == 128, 'without size, batch_size belongs to the largest'


def test_images_do_not_repeat_before_all_were_shown():
    shown = [index for batch in _batches(size=256)[1] for index, _ in batch]
    assert len(shown) > 4096 and len(set(shown[:4096])) == 4096


def test_sizes_depend_on_seed_and_epoch_only():
    def sides(**options):
        return [batch[0][1] for batch in _batches(**options)[1]]
    assert sides() == sides() and sides() != sides(epoch=1) and sides() != sides(seed=1)


def test_wrong_options():
    for multiple in (0, 256):
        with pytest.raises(ValueError, match=f'multiple must be from 1 to the batch_size of 128, got {multiple}'):
            _batches(multiple=multiple)


def test_training_sees_the_sizes_and_resumes_exactly(images, tmp_path, monkeypatch):
    shapes, forward = [], TimmClassifier.forward

    def kept(self, inputs, label=None, mode='tensor'):
        if mode == 'loss':
            shapes.append(tuple(inputs.shape))
        return forward(self, inputs, label, mode)
    monkeypatch.setattr(TimmClassifier, 'forward', kept)

    def arguments(name):
        return folder_arguments(images, tmp_path / name, 'default_hooks.checkpoint.max_keep_ckpts=9',
                                config=_config(tmp_path), epochs=4)
    train.main(arguments('whole'))
    expected = {(4, 3, 32, 32), (2, 3, 48, 48), (2, 3, 64, 64)}
    assert len(shapes) == 8 and set(shapes) <= expected and len(set(shapes)) > 1
    whole = shapes.copy()
    shapes.clear()
    train.main(arguments('resumed'))
    for name in ('epoch_3.pth', 'epoch_4.pth', 'last_checkpoint', 'last.safetensors', 'best.safetensors'):
        (tmp_path / 'resumed' / name).unlink(missing_ok=True)
    shapes.clear()
    train.main([*arguments('resumed'), '--resume'])
    assert shapes == whole[4:]
    weights = [read_checkpoint(tmp_path / run / 'last.safetensors')[0] for run in ('whole', 'resumed')]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_what_does_not_go_together(images, tmp_path):
    fails(folder_arguments(images, tmp_path / 'a', 'train_dataloader.batch_sampler.multiple=1',
                           config=_config(tmp_path)), 'batch_sampler needs an even multiple, got 1')
    with pytest.raises(ValueError, match='drop_last'):                      # of PyTorch's DataLoader
        train.main(folder_arguments(images, tmp_path / 'b', 'train_dataloader.drop_last=True',
                                    config=_config(tmp_path)))
    assert not (tmp_path / 'a').exists() and not list((tmp_path / 'b').glob('*.pth'))
