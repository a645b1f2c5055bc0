"""Data sets with labels for tokens, their metrics, and the training of a small network on them."""
import math

import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS
from torch.utils.data import DataLoader, default_collate
from user_errors import user_error

from subquad.tools import make_dataset, train
from subquad.tools import test as test_tool
from subquad.tools.data import recall, token_sets
from subquad.tools.engine.classification.model import TimmClassifier
from subquad.tools.engine.classification.prediction_metrics import AccuracyMetric, PerplexityMetric
from subquad.tools.engine.training.schedules import InverseSqrtLR

# ---- multi-query associative recall


@pytest.mark.parametrize('vocab_size, length, pairs', [(256, 64, 4), (10, 16, 4), (8192, 256, 16), (7, 4, 1)])
@pytest.mark.parametrize('filler', recall.FILLERS)
def test_recall_by_its_definition(vocab_size, length, pairs, filler):
    made = recall.multi_query_recall(200, 1, vocab_size, length, pairs, filler=filler)
    assert made.tokens.shape == (200, length) and made.places.shape == made.answers.shape == (200, pairs)
    assert 0 <= made.tokens.min() and made.tokens.max() < vocab_size
    for tokens, places, answers in zip(*made):
        keys, values = tokens[0:2 * pairs:2], tokens[1:2 * pairs:2]
        assert len({*keys}) == len({*values}) == pairs
        assert 1 <= keys.min() and keys.max() < vocab_size // 2 <= values.min()
        assert len({*places}) == pairs and 2 * pairs <= places.min() and not (places % 2).any()
        found = dict(zip(keys, values))
        assert sorted(tokens[places]) == sorted(keys) and [found[key] for key in tokens[places]] == [*answers]
        if filler == 'zero':
            assert (tokens != 0).sum() == 3 * pairs


def test_places_follow_the_power_law():
    made = recall.multi_query_recall(40_000, 0, 64, 32, 1, power=0.5)
    expected = np.arange(1, 16) ** -0.5
    counts = np.bincount((made.places[:, 0] - 2) // 2, minlength=15)
    expected *= 40_000 / expected.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 36.1                    # 0.1 % quantile of chi-squared, 14
    # Without replacement, in the order of the draws: the second place has the law of the places that are left.
    made = recall.multi_query_recall(40_000, 1, 64, 12, 2, power=0.5)
    weights = np.arange(1, 5) ** -0.5
    law = weights[:, None] * weights / (weights.sum() - weights)[:, None] / weights.sum() * (1 - np.eye(4))
    first, second = ((made.places - 4) // 2).T
    counts = np.bincount(4 * first + second, minlength=16).reshape(4, 4)
    assert np.abs(counts / 40_000 - law).max() < 0.01 and not np.diag(counts).any()


def test_keys_are_used_evenly_and_not_in_order():
    made = recall.multi_query_recall(20_000, 0, 10, 16, 4)
    keys = made.tokens[:, 0:8:2]
    assert all((np.sort(keys, 1) == [1, 2, 3, 4]).all(1))
    assert len(np.unique(keys, axis=0)) == 24 and abs((keys[:, 0] == 1).mean() - 0.25) < 0.02


def test_recall_is_repeatable():
    few, many, other = (recall.multi_query_recall(*arguments, 64, 32) for arguments in ((5, 3), (3000, 3), (5, 4)))
    for a, b in zip(few, many):
        np.testing.assert_array_equal(a, b[:5])
    assert (few.tokens != other.tokens).any() and len(many.tokens) == 3000
    assert len(np.unique(many.tokens, axis=0)) == 3000
    for arguments, message in (((0,), 'count must be'), ((1, 0, 9), 'vocab_size must be an integer of at least 10 for'),
                               ((1, 0, 64, 15), 'length must be an integer of at least 16 for pairs=4, got 15'),
                               ((1, 0, 64, 16, 4, 0.), 'power'), ((1, 0, 64, 16, 4, 1., 'no'), "filler.*got 'no'")):
        user_error(lambda arguments=arguments: recall.multi_query_recall(*arguments), match=message)


def test_recall_data_set():
    data = DATASETS.build(dict(type='MQAR', split='train', count=30, vocab_size=64, length=32, pairs=3))
    batch = next(iter(DataLoader(data, 30, collate_fn=default_collate)))
    assert batch['inputs'].shape == batch['label'].shape == (30, 32) and batch['inputs'].dtype == torch.int64
    known = batch['label'] >= 0
    assert (known.sum(1) == 3).all() and (batch['label'][~known] == -100).all()
    pairs = batch['inputs'][:, :6].unflatten(1, (3, 2))
    for inputs, label, pair in zip(batch['inputs'], batch['label'], pairs):
        found = dict(pair.tolist())
        assert [found[key] for key in inputs[label >= 0].tolist()] == label[label >= 0].tolist()
    assert len(data.metainfo['classes']) == 64 and len(data) == 30
    val = token_sets.MQAR('val', 30, 64, 32, 3)
    assert not torch.equal(val[0]['inputs'], data[0]['inputs'])
    user_error(lambda: token_sets.MQAR('train', 5, 64, 8), 'length must be')
    user_error(lambda: token_sets.MQAR('training', 5), "got 'training'")


def test_recall_files(tmp_path, capsys):
    def write(*options, folder='r'):
        sizes = ['--train', '40', '--val', '20', '--vocab-size', '64']
        make_dataset.main(['mqar', str(tmp_path / folder), *sizes, *options])
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    before = write('--length', '32')
    assert set(before) == {'dataset.json', 'train.npz', 'val.npz'}
    arrays = np.load(tmp_path / 'r' / 'val.npz')
    data = token_sets.MQAR('val', 20, 64, 32)
    for n, item in enumerate(data):
        assert item['inputs'].tolist() == [*arrays['inputs'][n]] and item['label'].tolist() == [*arrays['label'][n]]
    assert write('--length', '32') == before and 'exists already' in capsys.readouterr().out
    user_error(lambda: write(), 'other options', '--force')
    assert write('--force') != before
    (tmp_path / 'r' / 'notes.txt').write_text('mine')
    user_error(lambda: write('--force'), 'holds other files')
    user_error(lambda: write('--length', '8', folder='s'), 'length must be an integer of at least 16 for pairs=4')
    assert not (tmp_path / 's').exists()


# ---- text

def test_text_file_is_cut_and_shifted(tmp_path):
    text = bytes(range(256)) * 4
    (tmp_path / 'book.txt').write_bytes(text)
    parts = {split: token_sets.TextFiles(str(tmp_path / 'book.txt'), split, 16) for split in token_sets.SPLITS}
    assert b''.join(bytes(part.stream) for part in parts.values()) == text
    assert [len(part.stream) for part in parts.values()] == [921, 51, 52] and len(parts['train']) == 57
    item = parts['train'][3]
    assert item['inputs'].tolist() == [*range(48, 64)] and item['label'].tolist() == [*range(49, 65)]
    assert len(parts['train'].classes) == 256 and len([*parts['val']]) == 3
    user_error(lambda: token_sets.TextFiles(str(tmp_path / 'book.txt'), 'val', 51), 'has 51 tokens', '52')
    user_error(lambda: token_sets.TextFiles(str(tmp_path / 'none.txt'), 'val'), 'no text at')


def test_token_files(tmp_path):
    tokens = np.arange(100) % 50
    np.save(tmp_path / 'train.npy', tokens)
    tokens.astype(np.uint16).tofile(tmp_path / 'my-val.bin')
    (tmp_path / 'wiki.test.tokens').write_text('a text')
    train_part, val = (token_sets.TextFiles(str(tmp_path), split, 9, 50) for split in ('train', 'val'))
    assert len(train_part) == len(val) == 11 and len(val.classes) == 50
    for part in (train_part, val):
        assert part[5]['inputs'].tolist() == [*range(45, 50), *range(4)]
    assert len(token_sets.TextFiles(str(tmp_path), 'test', 5)) == 1
    user_error(lambda: token_sets.TextFiles(str(tmp_path), 'train', 9), 'vocab_size must be')
    user_error(lambda: token_sets.TextFiles(str(tmp_path), 'val', 9, 49), 'tokens from 0 to 49, but vocab_size=49')
    (tmp_path / 'train.txt').write_text('two')
    user_error(lambda: token_sets.TextFiles(str(tmp_path), 'train'), 'one file with train', 'train.npy, train.txt')
    (tmp_path / 'empty.txt').touch()
    user_error(lambda: token_sets.TextFiles(str(tmp_path / 'empty.txt'), 'train'), 'cannot read')
    np.save(tmp_path / 'x.npy', np.ones(5))
    user_error(lambda: token_sets.TextFiles(str(tmp_path / 'x.npy'), 'train'), 'one-dimensional', 'float64')


def test_standard_library_has_other_modules_in_each_part():
    parts = {split: token_sets.StandardLibrary(split, 64) for split in token_sets.SPLITS}
    sizes = {split: len(part.stream) for split, part in parts.items()}
    assert sizes['train'] > 8 * sizes['val'] > 0 and sizes['test'] > 20_000
    sources = [bytes(part.stream) for part in parts.values()]
    assert b'import' in sources[1] and sources[1][:2000] not in sources[0] and sources[2][:2000] not in sources[0]
    assert len(token_sets.StandardLibrary('train', 64, 641)) == 10


# ---- metrics, schedule, training

def test_metrics_of_tokens():
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]])
    samples = [dict(scores=scores, label=torch.tensor([0, 2, 2])), dict(scores=scores[:1], label=torch.tensor([1]))]
    accuracy, perplexity = AccuracyMetric(topk=(1, 2)), PerplexityMetric()
    for metric in (accuracy, perplexity):
        metric.process(None, samples)
    assert accuracy.evaluate(2) == {'accuracy/top1': 50.0, 'accuracy/top2': 75.0}
    mean = sum(map(math.log, (0.5, 0.1, 0.5, 0.3))) / 4
    found = perplexity.evaluate(2)
    assert found['language/log_likelihood'] == pytest.approx(mean, rel=1e-6)
    assert found['language/perplexity'] == pytest.approx(math.exp(-mean), rel=1e-6)


def test_only_labeled_tokens_count_in_the_loss():
    torch.manual_seed(0)
    model = TimmClassifier('lcsm_sequence', num_classes=11, dim=8, num_heads=1)
    tokens = torch.randint(0, 11, (2, 6))
    label = torch.full((2, 6), -100)
    label[0, 3], label[1, 5], label[1, 0] = 4, 5, 6
    logits = model(tokens)
    expected = -torch.stack([logits.log_softmax(-1)[at] for at in ((0, 3, 4), (1, 5, 5), (1, 0, 6))]).mean()
    assert torch.allclose(model(tokens, label, 'loss')['loss'], expected)
    first, second = model(tokens, label, 'predict')
    assert first['scores'].shape == (1, 11) and second['label'].tolist() == [6, 5]
    assert torch.allclose(second['scores'], logits[1, [0, 5]].softmax(-1))


def test_inverse_square_root_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.)
    schedule = InverseSqrtLR(optimizer, begin=4, by_epoch=False)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([min(1, (4 / max(step, 1)) ** 0.5) for step in range(20)])
    InverseSqrtLR(optimizer, begin=4, end=3, by_epoch=False)


def _loss(text):
    return float(text.rsplit('loss ', 1)[1].split()[0])


def test_training_on_recall_and_on_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ['model.dim=32', 'model.num_heads=2', 'model.expand_dim=8']
    counts = [f'{part}_dataloader.dataset.count={count}' for part, count in (('train', 320), ('val', 20), ('test', 20))]
    for code in ('1-0-1-0', '1-1-1-0'):
        arguments = ['lcsm_mqar-small', '--cfg-options', *small, *counts, f'model.mixer={code}', 'param_scheduler=[]',
                     'optim_wrapper.optimizer.lr=1e-2', 'train_dataloader.batch_size=16']
        train.main([*arguments, '--epochs', '2'])
        assert _loss(capsys.readouterr().err) < math.log(256) - 0.3         # of the second epoch
    test_tool.main(['lcsm_mqar-small', 'runs/lcsm_mqar-small/last.safetensors', *arguments[1:]])
    assert 'accuracy/top1' in capsys.readouterr().out
    (tmp_path / 'book.txt').write_text('the quick brown fox jumps over the lazy dog; ' * 400)
    arguments = ['lcsm_language', '--data', 'book.txt', '--cfg-options', *small, 'model.depth=1', 'model.mixer=1-1-1-4',
                 'train_cfg.max_iters=30', 'train_dataloader.batch_size=8', 'optim_wrapper.optimizer.lr=1e-2',
                 'param_scheduler.0.end=5', 'param_scheduler.1.begin=5',
                 *(f'{part}_dataloader.dataset.length=64' for part in token_sets.SPLITS)]
    train.main(arguments)
    capsys.readouterr()
    test_tool.main(['lcsm_language', 'runs/lcsm_language/last.safetensors', *arguments[1:]])
    name, value = capsys.readouterr().out.splitlines()[0].split()
    assert name == 'language/perplexity' and 1 < float(value) < 100
