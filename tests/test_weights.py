"""Weight files: what is read, what is refused, and that nothing stays random or half-written."""
import argparse
import os
import pickle

import numpy as np
import pytest
import timm
import torch

from subquad.backbones.weights import WeightsError, load_weights, read_checkpoint, save_weights


@pytest.fixture
def model():
    return timm.create_model('test_ppma', num_classes=4)


def _same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))


def test_round_trip_with_metadata(model, tmp_path):
    path = tmp_path / 'w.safetensors'
    save_weights(model, path, dict(model='test_ppma', classes=['a', 'b']))
    weights, facts, source = read_checkpoint(path)
    assert facts == dict(model='test_ppma', classes=['a', 'b']) and source == '' and len(weights) > 100
    other = timm.create_model('test_ppma', num_classes=4)
    assert not _same(model, other)
    load_weights(other, path)
    assert _same(model, other)
    assert [p.name for p in tmp_path.iterdir()] == ['w.safetensors']


@pytest.mark.parametrize('wrapper', ['', 'model', 'state_dict', 'runner'])
def test_foreign_pickles(model, tmp_path, wrapper):
    state = model.state_dict()
    content = {'': state, 'model': {'model': state, 'args': argparse.Namespace(lr=0.1), 'best': np.float64(3)},
               'state_dict': {'state_dict': state, 'epoch': 3},
               'runner': {'state_dict': {f'net.{k}': v for k, v in state.items()}, 'meta': {}}}[wrapper]
    torch.save(content, tmp_path / 'w.pth')
    other = timm.create_model('test_ppma', num_classes=4)
    load_weights(other, tmp_path / 'w.pth')
    assert _same(model, other)


def test_what_training_wraps_around_the_names_comes_off(model, tmp_path):
    state = {f'module.{k}': v for k, v in model.state_dict().items()}
    torch.save({'state_dict_ema': state, 'model_ema': {}}, tmp_path / 'w.pth')
    other = timm.create_model('test_ppma', num_classes=4)
    assert load_weights(other, tmp_path / 'w.pth') == 'state_dict_ema' and _same(model, other)


def test_only_output_norms_and_a_spare_classifier_may_differ(model, tmp_path):
    save_weights(model, tmp_path / 'w.safetensors')
    dense = timm.create_model('test_ppma', num_classes=0, output_norms=True)
    load_weights(dense, tmp_path / 'w.safetensors')
    assert torch.equal(dense.stages[0].blocks[0].mixer.q.weight, model.stages[0].blocks[0].mixer.q.weight)


def test_averaged_weights_are_read_and_named(model, tmp_path):
    state = model.state_dict()
    torch.save({'model': state, 'model_ema': {k: v * 2 if v.is_floating_point() else v for k, v in state.items()}},
               tmp_path / 'w.pth')
    other = timm.create_model('test_ppma', num_classes=4)
    assert load_weights(other, tmp_path / 'w.pth') == 'model_ema'
    assert torch.equal(other.head.fc.weight, model.head.fc.weight * 2)


class _Code:
    """Unpickling it would make a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickle_with_code_is_refused_and_not_run(model, tmp_path):
    path, marker = tmp_path / 'w.pth', tmp_path / 'was_run'
    torch.save({'state_dict': model.state_dict(), 'hook': _Code(marker)}, path)
    with pytest.raises(WeightsError, match='could run code .*mkdir.*refused'):
        read_checkpoint(path)
    path.write_bytes(pickle.dumps({'a': _Code(marker)}))
    with pytest.raises(WeightsError):
        read_checkpoint(path)
    assert not marker.exists()


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(WeightsError, match='no weight file at'):
        read_checkpoint(tmp_path / 'none.safetensors')
    for name in ('w.safetensors', 'w.pth'):
        (tmp_path / name).write_bytes(b'not weights at all')
        with pytest.raises(WeightsError, match='damaged'):
            read_checkpoint(tmp_path / name)
    torch.save({'epoch': 3}, tmp_path / 'w.pth')
    with pytest.raises(WeightsError, match='holds no weights'):
        read_checkpoint(tmp_path / 'w.pth')


def test_truncated_safetensors(model, tmp_path):
    path = tmp_path / 'w.safetensors'
    save_weights(model, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match='damaged'):
        load_weights(model, path)


def test_another_models_checkpoint_names_keys_and_shapes(model, tmp_path):
    path = tmp_path / 'w.safetensors'
    save_weights(timm.create_model('test_ppma', num_classes=9), path)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r'not a checkpoint of this test_ppma: 2 shapes differ \(head.fc.weight '
                                           r'\(9, 128\) instead of \(4, 128\)'):
        load_weights(model, path)
    save_weights(timm.create_model('test_vit'), path)
    with pytest.raises(WeightsError, match='keys missing .*keys not in the model .*blocks.0.attn'):
        load_weights(model, path)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_failed_write_leaves_the_old_file(model, tmp_path, monkeypatch):
    path = tmp_path / 'w.safetensors'
    save_weights(model, path)
    content = path.read_bytes()

    def fail(*args):
        raise OSError('disk full')
    monkeypatch.setattr('subquad.backbones.weights.save_file', fail)
    with pytest.raises(OSError, match='disk full'):
        save_weights(model, path)
    assert path.read_bytes() == content and len(list(tmp_path.iterdir())) == 1


class _Reach:
    """Pickled as getattr(owner, name)."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_getattr_reaches_a_runners_statistics_and_nothing_else(tmp_path):
    """Checkpoints of mmengine's Runner hold HistoryBuffers, whose pickles call getattr for their own methods."""
    buffer = pytest.importorskip('mmengine.logging').HistoryBuffer
    path = tmp_path / 'w.pth'
    log = buffer([1., 2.], [1, 1])
    torch.save({'state_dict': {'w': torch.ones(1)}, 'message_hub': {'loss': log}}, path)
    assert read_checkpoint(path)[0].keys() == {'w'}
    for owner, name in ((buffer, '__init__'), (buffer, '__globals__'), (np.ndarray, 'tofile'), (log, 'mean')):
        torch.save({'state_dict': {'w': torch.ones(1)}, 'x': _Reach(owner, name)}, path)
        with pytest.raises(WeightsError, match='could run code|damaged'):
            read_checkpoint(path)
