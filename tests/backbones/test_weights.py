"""Weight files: reading, writing, and errors for damaged, unsafe and mismatched files."""
import argparse
import os
import pickle
import re
import zipfile

import numpy as np
import pytest
import timm
import torch

from subquad.backbones.weights import (
    WeightsError,
    check_finite,
    load_weights,
    read_checkpoint,
    read_file,
    save_weights,
)
from subquad.backbones.weights.metadata import check_transform


@pytest.fixture
def model():
    return timm.create_model('test_ppma', num_classes=4)


def _same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))


def test_saved_weights_and_metadata_are_read_back(model, tmp_path):
    path = tmp_path / 'w.safetensors'
    save_weights(model, path, dict(model='test_ppma', classes=['a', 'b']))
    weights, metadata, source = read_checkpoint(path)
    assert metadata == dict(model='test_ppma', classes=['a', 'b']) and source == '' and len(weights) > 100
    other = timm.create_model('test_ppma', num_classes=4)
    assert not _same(model, other)
    load_weights(other, path)
    assert _same(model, other)
    assert [p.name for p in tmp_path.iterdir()] == ['w.safetensors']


def test_tied_weights_are_saved(tmp_path):
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    save_weights(tied, tmp_path / 'tied.safetensors')
    weights, *_ = read_checkpoint(tmp_path / 'tied.safetensors')
    assert torch.equal(weights['1.weight'], weights['0.weight']) and torch.equal(weights['0.weight'], tied[0].weight)


def test_an_interpolation_that_timm_does_not_have_is_refused():
    with pytest.raises(WeightsError, match='interpolation'):
        check_transform({'interpolation': 'random'}, 'w.safetensors')


def test_equal_weights_give_equal_files(model, tmp_path):
    """The package safetensors writes metadata in random order."""
    metadata = {'model': 'test_ppma', 'classes': ['Käse', 'b\n"c"', '\u2028'], 'epoch': 3}
    contents = set()
    for number in range(12):
        save_weights(model, tmp_path / f'{number}.safetensors', metadata)
        contents.add((tmp_path / f'{number}.safetensors').read_bytes())
    assert len(contents) == 1
    weights, read, _ = read_checkpoint(tmp_path / '0.safetensors')
    assert read == metadata and all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize('wrapper', ['', 'model', 'state_dict', 'runner'])
def test_checkpoints_of_other_programs_load(model, tmp_path, wrapper):
    state = model.state_dict()
    content = {'': state, 'model': {'model': state, 'args': argparse.Namespace(lr=0.1), 'best': np.float64(3)},
               'state_dict': {'state_dict': state, 'epoch': 3},
               'runner': {'state_dict': {f'net.{k}': v for k, v in state.items()}, 'meta': {}}}[wrapper]
    torch.save(content, tmp_path / 'w.pth')
    other = timm.create_model('test_ppma', num_classes=4)
    load_weights(other, tmp_path / 'w.pth')
    assert _same(model, other)


def test_training_prefixes_are_removed_from_keys(model, tmp_path):
    state = {f'module.{k}': v for k, v in model.state_dict().items()}
    torch.save({'state_dict_ema': state, 'model_ema': {}}, tmp_path / 'w.pth')
    other = timm.create_model('test_ppma', num_classes=4)
    assert load_weights(other, tmp_path / 'w.pth') == 'state_dict_ema' and _same(model, other)


@pytest.mark.filterwarnings('ignore:.*has no output norms')
def test_output_norms_and_unused_classifier_may_differ(model, tmp_path):
    save_weights(model, tmp_path / 'w.safetensors')
    dense = timm.create_model('test_ppma', num_classes=0, output_norms=True)
    load_weights(dense, tmp_path / 'w.safetensors')
    assert torch.equal(dense.stages[0].blocks[0].mixer.q.weight, model.stages[0].blocks[0].mixer.q.weight)


def test_other_suffixes_are_not_written(model, tmp_path):
    for name in ('w.pth', 'w', 'w.safetensors.bak'):
        with pytest.raises(ValueError, match=f'{name} must end in .safetensors'):
            save_weights(model, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('raw_key, averaged_key', [
    ('model', 'model_ema'), ('models', 'model_ema'), ('state_dict', 'state_dict_ema'),
    ('model_state_dict', 'ema_state_dict')])
def test_averaged_or_raw_weights_are_read(model, raw_key, averaged_key, tmp_path):
    state, path = model.state_dict(), tmp_path / 'w.pth'
    average = {key: value * 2 if value.is_floating_point() else value for key, value in state.items()}
    torch.save({raw_key: state, averaged_key: average}, path)
    other = timm.create_model('test_ppma', num_classes=4)
    for weights, source, factor, note in (
            (None, averaged_key, 2, f'w.pth: its averaged weights ({averaged_key}) are read, not the raw ones'),
            ('averaged', averaged_key, 2, f'({averaged_key}) are read, not the raw ones ({raw_key})'),
            ('raw', raw_key, 1, f'its raw weights ({raw_key}) are read, not the averaged ones ({averaged_key})')):
        with pytest.warns(UserWarning, match=re.escape(note)) as said:
            assert load_weights(other, path, weights=weights) == source
        assert len(said) == 1 and torch.equal(other.head.fc.weight, model.head.fc.weight * factor)
    assert read_file(path, preferred='raw').source == raw_key
    assert read_file(path, 'averaged', preferred='raw').source == averaged_key
    torch.save({raw_key: state}, path)
    assert read_file(path).source == read_file(path, preferred='raw').source == raw_key
    with pytest.raises(WeightsError, match=rf"w.pth: it has no averaged weights, only raw ones \({raw_key}\); "
                                           "set weights='raw'"):
        load_weights(other, path, weights='averaged')
    torch.save({averaged_key: state}, path)
    assert read_file(path).source == read_file(path, preferred='raw').source == averaged_key
    with pytest.raises(WeightsError, match="it has no raw weights, only averaged ones .*; set weights='averaged'"):
        load_weights(other, path, weights='raw')
    with pytest.raises(ValueError, match="weights must be 'averaged' or 'raw', got 'best'"):
        load_weights(other, path, weights='best')


def test_either_choice_reads_files_without_a_choice(model, tmp_path, recwarn):
    state = model.state_dict()
    torch.save(state, tmp_path / 'bare.pth')
    save_weights(model, tmp_path / 'w.safetensors')
    for file in ('bare.pth', 'w.safetensors'):
        for weights in (None, 'averaged', 'raw'):
            found, _, key = read_checkpoint(tmp_path / file, weights)
            assert found.keys() == state.keys() and key == ''
    assert not [item for item in recwarn if issubclass(item.category, UserWarning)]
    with pytest.raises(ValueError, match="got 'best'"):
        read_checkpoint(tmp_path / 'w.safetensors', 'best')


def test_average_and_raw_weights_of_mmengine(model, tmp_path):
    """EMAHook writes the average under state_dict and the raw weights under ema_state_dict, with its step."""
    from mmengine.hooks import EMAHook
    wrapped = torch.nn.Module()
    wrapped.net = model
    hook = EMAHook(momentum=0.5)
    hook.before_run(type('Runner', (), dict(model=wrapped))())
    hook.ema_model.module.load_state_dict({key: value + 1 if value.is_floating_point() else value
                                           for key, value in wrapped.state_dict().items()})
    checkpoint = dict(state_dict=dict(wrapped.state_dict()))
    hook.before_save_checkpoint(None, checkpoint)
    path = tmp_path / 'epoch_1.pth'
    torch.save(checkpoint, path)
    raw, key = model.state_dict(), 'head.fc.weight'
    for options, source, step in ((dict(), 'state_dict', 1), (dict(preferred='raw'), 'state_dict', 1),
                                  (dict(weights='averaged'), 'state_dict', 1),
                                  (dict(weights='raw'), 'ema_state_dict', 0)):
        found = read_file(path, **options)
        assert found.source == source and found.weights.keys() == raw.keys()
        assert torch.equal(found.weights[key], raw[key] + step)
    assert found.choice == 'its raw weights (ema_state_dict) are read, not the averaged ones (state_dict)'
    assert load_weights(model, path, weights='raw') == 'ema_state_dict'


class _Code:
    """Pickle that would create a folder when it is loaded."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_code_in_a_pickle_is_not_run(model, tmp_path):
    path, marker = tmp_path / 'w.pth', tmp_path / 'was_run'
    torch.save({'state_dict': model.state_dict(), 'hook': _Code(marker)}, path)
    with pytest.raises(WeightsError, match='could run code .*mkdir.*was not read'):
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


def test_truncated_safetensors_are_refused(model, tmp_path):
    path = tmp_path / 'w.safetensors'
    save_weights(model, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match='damaged'):
        load_weights(model, path)


def test_checkpoint_of_another_model_names_keys_and_shapes(model, tmp_path):
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


def test_failed_write_keeps_the_old_file(model, tmp_path, monkeypatch):
    path = tmp_path / 'w.safetensors'
    save_weights(model, path)
    content = path.read_bytes()

    def fail(*args):
        raise OSError('disk full')
    monkeypatch.setattr('subquad.backbones.weights.files.save_file', fail)
    with pytest.raises(OSError, match='disk full'):
        save_weights(model, path)
    assert path.read_bytes() == content and len(list(tmp_path.iterdir())) == 1


class _Reach:
    """Object that is pickled as getattr(owner, name)."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_pickled_getattr_reaches_history_buffers_only(tmp_path):
    """Checkpoints of MMEngine's Runner hold HistoryBuffers, whose pickles call getattr for their own methods."""
    buffer = pytest.importorskip('mmengine.logging').HistoryBuffer
    path = tmp_path / 'w.pth'
    log = buffer([1., 2.], [1, 1])
    torch.save({'state_dict': {'w': torch.ones(1)}, 'message_hub': {'loss': log}}, path)
    assert read_checkpoint(path)[0].keys() == {'w'}
    for owner, name in ((buffer, '__init__'), (buffer, '__globals__'), (np.ndarray, 'tofile'), (log, 'mean')):
        torch.save({'state_dict': {'w': torch.ones(1)}, 'x': _Reach(owner, name)}, path)
        with pytest.raises(WeightsError, match='could run code|damaged'):
            read_checkpoint(path)


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_check_finite_names_tensors(value, dtype):
    weights = {'a': torch.ones(3, dtype=dtype), 'count': torch.ones(2, dtype=torch.int64)}
    check_finite(weights, 'w.pth')
    weights['b.bias'] = torch.tensor([1., value], dtype=dtype)
    with pytest.raises(WeightsError, match=r'w.pth holds NaN or infinite values in 1 of 3 tensors \(b.bias\)'):
        check_finite(weights, 'w.pth')


def _refused(content, path, older=False):
    torch.save(content, path, _use_new_zipfile_serialization=not older)
    with pytest.raises(WeightsError) as caught:
        read_checkpoint(path)
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


ODD_TENSORS = {
    'is sparse (torch.sparse_coo)': lambda: torch.eye(3).to_sparse(),
    'is sparse (torch.sparse_csr)': lambda: torch.eye(3).to_sparse_csr(),
    'is a meta tensor without data': lambda: torch.empty(3, device='meta'),
    'is quantized': lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    'nested': lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    'expands to 20,000,000,000 bytes': lambda: torch.zeros(1).expand(5_000_000_000),
    'expands to 20,000,000,000': lambda: torch.zeros(()).expand(100_000, 50_000)}


@pytest.mark.filterwarnings('ignore')       # torch's, of formats that are experimental or deprecated
@pytest.mark.parametrize('kind', ODD_TENSORS)
def test_tensors_that_are_not_dense_are_refused(kind, tmp_path):
    message = _refused({'ok': torch.ones(2), 'odd.weight': ODD_TENSORS[kind]()}, tmp_path / 'w.pth')
    assert 'odd.weight' in message and kind in message


def test_a_small_expanded_tensor_is_read(tmp_path):
    torch.save({'a': torch.ones(1).expand(8)}, tmp_path / 'w.pth')
    assert read_checkpoint(tmp_path / 'w.pth')[0]['a'].shape == (8,)


@pytest.mark.parametrize('content', [{0: torch.ones(1)}, {'model': {1: torch.ones(1)}}, {None: torch.ones(1)},
                                     {('a', 1): torch.ones(1), 'b': torch.ones(1)}], ids=str)
def test_keys_that_are_not_strings_are_refused(content, tmp_path):
    assert 'names of weights must be strings, got ' in _refused(content, tmp_path / 'w.pth')


@pytest.mark.parametrize('content', [[], 3, None, torch.ones(3), {'model': {}}, {'a': 1.0}, 'x', {}], ids=str)
def test_checkpoint_without_weights_is_refused(content, tmp_path):
    assert 'holds no weights' in _refused(content, tmp_path / 'w.pth')


def test_unreadable_paths_raise_short_errors(tmp_path):
    for path, reason in (('x' * 5000 + '.pth', 'File name too long'), ('a/' * 3000 + 'w.safetensors', 'too long'),
                         (tmp_path, 'is not a file'), ('a\0b.pth', 'no weight file at'), ('', 'is not a file'),
                         (tmp_path / 'w.pth' / 'x', 'no weight file at')):
        with pytest.raises(WeightsError, match=reason) as caught:
            read_checkpoint(path)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize('older', [False, True])
@pytest.mark.parametrize('protocol', [2, 3, 4, 5])
def test_pickle_that_names_code_is_called_unsafe(older, protocol, tmp_path):
    """torch names the code of the protocols that torch.save writes; the marks of later ones it does not know."""
    named = r'is a pickle that could run code \(\w+\.mkdir\)' if protocol < 4 else 'a pickle that could run code,'
    path, marker = tmp_path / 'w.pth', tmp_path / 'was_run'
    for content in ({'w': torch.ones(1), 'x': _Code(marker)}, {'x': _Code(marker)}, _Code(marker)):
        torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not older)
        with pytest.raises(WeightsError, match=f'{named} and was not read'):
            read_checkpoint(path)
    for content in ({'x': _Code(marker)}, _Code(marker)):
        path.write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(WeightsError, match=f'{named} and was not read'):
            read_checkpoint(path)
    assert not marker.exists()


def test_unlisted_functions_and_classes_are_unsafe(tmp_path):
    for content in (pickle.UnpicklingError('x'), os.path.join, print, torch.nn.Linear(2, 2), torch.load):
        assert 'could run code' in _refused({'w': torch.ones(1), 'x': content}, tmp_path / 'w.pth')
    (tmp_path / 'w.pth').write_bytes(b'cos\nsystem\n(S"true"\ntR.')
    with pytest.raises(WeightsError, match=r'could run code \((os|posix).system\)'):
        read_checkpoint(tmp_path / 'w.pth')
    torch.save({'w': torch.ones(1)}, tmp_path / 'w.pth')
    damaged = (tmp_path / 'w.pth').read_bytes()
    (tmp_path / 'w.pth').write_bytes(damaged[:len(damaged) // 2])
    with pytest.raises(WeightsError, match='is damaged'):
        read_checkpoint(tmp_path / 'w.pth')


def test_compressed_archive_is_refused_before_unpacking(tmp_path):
    torch.save({'w': torch.zeros(5_000_000)}, tmp_path / 'uncompressed.pth')
    with zipfile.ZipFile(tmp_path / 'uncompressed.pth') as source, zipfile.ZipFile(tmp_path / 'w.pth', 'w') as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(WeightsError, match='is a compressed archive .20,0'):
        read_checkpoint(tmp_path / 'w.pth')


def test_changed_byte_of_an_archive_is_refused(tmp_path):
    """torch compares no checksums, and gives random memory for an entry that is marked as a folder."""
    path = tmp_path / 'w.pt'
    torch.save({'w': torch.arange(100.)}, path)
    content = path.read_bytes()
    record = content.index(torch.arange(100.).numpy().tobytes())
    header = content.rindex(b'PK\1\2', 0, content.rindex(b'data/0'))
    for at, words in ((record + 50, 'w.pt is damaged .w/data/0 differs from its checksum'),
                      (header + 38, 'w.pt is damaged .an entry is marked as a folder')):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1:])
        torch.load(path)
        with pytest.raises(WeightsError, match=words):
            read_checkpoint(path)


@pytest.mark.skipif(not hasattr(torch.serialization, 'set_crc32_options'), reason='torch always writes them')
def test_archive_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({'w': torch.ones(9)}, tmp_path / 'w.pt')
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_checkpoint(tmp_path / 'w.pt')[0]['w'].sum() == 9


def test_torchscript_file_is_unsafe(tmp_path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), str(tmp_path / 'w.pt'))
    with pytest.raises(WeightsError, match='could run code .TorchScript'):
        read_checkpoint(tmp_path / 'w.pt')


@pytest.mark.parametrize('module', ['numpy.core.multiarray', 'numpy._core.multiarray'])
def test_pickles_of_both_numpy_versions_load(module, tmp_path):
    """NumPy 2 renamed the module that pickles name."""
    content = {'w': torch.ones(1), 'best': np.float64(3), 'log': np.arange(3.), 'n': np.int64(2), 'ok': np.bool_(True)}
    torch.save(content, tmp_path / 'w.pth')
    with zipfile.ZipFile(tmp_path / 'w.pth') as source, zipfile.ZipFile(tmp_path / 'other.pth', 'w') as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith('data.pkl'):
                assert b'core.multiarray\n' in data
                data = re.sub(rb'numpy\._?core\.multiarray\n', module.encode() + b'\n', data)
            target.writestr(entry.filename, data)
    assert read_checkpoint(tmp_path / 'other.pth')[0].keys() == {'w'}
