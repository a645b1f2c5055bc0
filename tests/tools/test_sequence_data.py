"""Data made by programs: what the generators of expressions, images and random fields promise."""
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import listops_text
from mmengine.registry import DATASETS
from torch.utils.data import DataLoader, default_collate
from user_errors import user_error

from lab import fields
from subquad.tools.data import listops, pathfinder, sequences

STYLES = {'pathfinder': pathfinder.PATHFINDER, 'path-x': pathfinder.PATH_X}


# ---- ListOps

def _answer(tokens):
    """Evaluated with a stack, from the tokens' names."""
    stack = []
    for name in (listops.VOCABULARY[token] for token in tokens):
        if name != ']':
            stack.append(name if name.startswith('[') else int(name))
            continue
        arguments = []
        while not isinstance(stack[-1], str):
            arguments.append(stack.pop())
        value = {'[MIN': min, '[MAX': max, '[MED': lambda a: int(np.median(a)), '[SM': lambda a: sum(a) % 10}
        assert 2 <= len(arguments) <= 10
        stack.append(int(value[stack.pop()](arguments)))
    assert len(stack) == 1
    return stack[0]


@pytest.mark.parametrize('bounds, count', [((500, 2000), 60), ((50, 128), 500)])
def test_listops_answers_and_lengths(bounds, count):
    made = listops.listops(count, 3, *bounds)
    assert len(made) == count and made.tokens.dtype == np.uint8 and made.answers.dtype == np.int64
    assert bounds[0] < made.lengths.min() and made.lengths.max() < bounds[1]
    for index in range(count):
        tokens = made.sequence(index)
        assert _answer(tokens) == made.answers[index]
        opens = (tokens >= listops.OPERATOR) & (tokens < listops.CLOSE)
        depth = np.cumsum(opens.astype(int) - (tokens == listops.CLOSE))
        assert depth.max() <= 9                                        # digits at depth 10
        np.testing.assert_array_equal(listops.from_text(listops_text(tokens).encode()), tokens)
    assert set(np.unique(made.tokens)) == set(range(listops.DIGIT, listops.CLOSE + 1))
    names = Counter(made.tokens[made.tokens >= listops.OPERATOR].tolist())
    operators = [names[n] for n in range(listops.OPERATOR, listops.CLOSE)]
    assert max(operators) < 1.2 * min(operators) and names[listops.CLOSE] == sum(operators)


def test_listops_has_the_distribution_of_the_recursive_grammar():
    rng = np.random.default_rng(0)

    def length(depth, room):
        if depth == 10 or rng.random() > 0.25 or room <= 0:
            return 1
        total = 2
        for _ in range(rng.integers(2, 11)):
            total += length(depth + 1, room - total)
        return total
    drawn = np.array([n for n in (length(1, 70) for _ in range(8000)) if 5 < n < 60])
    made = listops.listops(4000, 1, 5, 60).lengths
    error = (drawn.var() / len(drawn) + made.var() / len(made)) ** 0.5
    assert abs(drawn.mean() - made.mean()) < 4 * error and abs(drawn.std() / made.std() - 1) < 0.1


def test_listops_is_repeatable():
    few, many, other = listops.listops(5, 0), listops.listops(600, 0), listops.listops(5, 1)
    np.testing.assert_array_equal(few.tokens, many.tokens[:few.starts[-1]])
    np.testing.assert_array_equal(few.answers, many.answers[:5])
    assert few.lengths.tolist() != other.lengths.tolist()
    user_error(lambda: listops.listops(0), 'count must be an integer of at least 1, got 0')
    user_error(lambda: listops.listops(1, 0, 50, 51), 'no length is above min_length=50 and below max_length=51')
    user_error(lambda: listops.listops(1, max_depth=2), 'has between 500 and 2000 tokens')


def test_listops_data_set():
    short = dict(type='ListOps', min_length=50, max_length=128, count=40)
    train = DATASETS.build(dict(short, split='train'))
    test = DATASETS.build(dict(short, split='test', with_length=True))
    assert train.metainfo['classes'] == [str(n) for n in range(10)] and train.length == test.length == 128
    batch = next(iter(DataLoader(test, 40, collate_fn=default_collate)))
    assert batch['inputs'].shape == (40, 128) and batch['inputs'].dtype == torch.int64
    assert torch.equal((batch['inputs'] != listops.PAD).sum(1), batch['length'])
    np.testing.assert_array_equal(test.lengths + 1, batch['length'])                  # and the end mark
    assert (batch['inputs'].gather(1, batch['length'][:, None] - 1) == listops.EOS).all()
    assert set(train[0]) == {'inputs', 'label'} and isinstance(train[0]['label'], int)
    assert not torch.equal(train[0]['inputs'], test[0]['inputs'])
    bare = sequences.ListOps('train', 40, 50, 128, append_eos=False, length=200)
    assert bare[0]['inputs'].tolist() == [*train.expressions.sequence(0)] + [0] * (200 - train.lengths[0])
    assert sequences.ListOps('val', 3).length == 2048 and len(listops.VOCABULARY) == 18
    user_error(lambda: sequences.ListOps('train', 40, 50, 128, length=60), 'length must be at least')
    user_error(lambda: sequences.ListOps('training', 2), "one of 'train', 'val', 'test', got 'training'")


# ---- Pathfinder-like

@pytest.fixture(scope='module')
def images():
    return pathfinder.pathfinder_like(400, 0)


def test_pathfinder_like_is_balanced_and_repeatable(images):
    pictures, labels = images
    assert pictures.shape == (400, 32, 32) and pictures.dtype == np.uint8 and labels.dtype == np.int64
    assert (labels[::2] + labels[1::2] == 1).all()
    few, few_labels = pathfinder.pathfinder_like(7, 0)
    np.testing.assert_array_equal(few, pictures[:7])
    np.testing.assert_array_equal(few_labels, labels[:7])
    assert (pathfinder.pathfinder_like(7, 1)[0] != few).any()
    user_error(lambda: pathfinder.pathfinder_like(0), 'at least 1')


def test_pathfinder_like_does_not_leak(images):
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    pictures, labels = images[0] / 255, images[1]
    ink = pictures.sum((1, 2))
    first, second = ink[labels == 1], ink[labels == 0]
    assert abs(first.mean() - second.mean()) < 3.5 * (first.var() / 200 + second.var() / 200) ** 0.5
    pooled = pictures.reshape(-1, 8, 4, 8, 4).mean((2, 4)).reshape(-1, 64)
    assert cross_val_score(LogisticRegression(C=0.1, max_iter=300), pooled, labels, cv=4).mean() < 0.57


@pytest.mark.parametrize('style', STYLES.values(), ids=STYLES)
def test_pathfinder_like_marks_are_as_far_apart_for_both_answers(style):
    marks = np.stack([m for n in range(3) for _, m in pathfinder._scenes(np.random.default_rng(n), style)])
    across, together = np.linalg.norm(marks[:, :, 1] - marks[:, :, 0], axis=-1).T
    assert np.abs(across - together).max() < style.size / 20
    assert abs(across.mean() - together.mean()) < style.size / 200


@pytest.mark.parametrize('style', STYLES.values(), ids=STYLES)
def test_pathfinder_like_shows_its_answer(style):
    """Drawn larger, dots small, dashes thick enough to meet: connected pixels say which dots are on one curve."""
    from scipy import ndimage
    scale = 8 / style.gap
    larger = replace(style, size=round(style.size * scale), thickness=style.thickness * scale, radius=1, oversampling=1)
    y, x = np.mgrid[-5:6, -5:6]
    for dashes, marks in pathfinder._scenes(np.random.default_rng(5), style)[:12]:
        for answer in (0, 1):
            drawn = pathfinder._draw(larger, dashes * scale, marks[answer] * scale) > 0
            curves = ndimage.label(ndimage.binary_dilation(drawn, np.hypot(y, x) <= 5), np.ones((3, 3)))[0]
            (x0, y0), (x1, y1) = np.round(marks[answer] * scale).astype(int)
            assert curves[y0, x0] and (curves[y0, x0] == curves[y1, x1]) == bool(answer)


def test_pathfinder_like_data_sets():
    for name, size in (('PathfinderLike', 32), ('PathXLike', 128)):
        train = DATASETS.build(dict(type=name, split='train', count=60))
        assert train[0]['inputs'].shape == (1, size, size) and train[0]['inputs'].dtype == torch.float32
        values = torch.stack([item['inputs'] for item in train])
        assert abs(values.mean()) < 0.05 and abs(values.std() - 1) < 0.05
        assert not np.array_equal(train.images[0], DATASETS.build(dict(type=name, split='val', count=1)).images[0])
    assert train.classes[train[0]['label']] in ('one curve', 'two curves')


def test_pathfinder_like_of_other_difficulty():
    def build(**options):
        return DATASETS.build(dict(type='PathfinderLike', split='train', count=40, **options))
    hard, easy, alone = build(), build(dashes=4), build(dashes=4, distractors=0)
    np.testing.assert_array_equal(build(dashes=14, distractors=5).images, hard.images)
    ink = [data.images.mean() for data in (hard, easy, alone)]
    assert ink[0] > 1.3 * ink[1] and ink[1] > 1.3 * ink[2]
    np.testing.assert_array_equal(build(dashes=4, distractors=0).images, alone.images)


@pytest.mark.parametrize('name, options, message', [
    *(('PathfinderLike', dict(dashes=value), f'dashes must be an integer from 4 to 14, got {value!r}')
      for value in (3, 15, 4.0, True, '4')),
    *(('PathfinderLike', dict(distractors=value), f'distractors must be an integer from 0 to 5, got {value!r}')
      for value in (-1, 6, False)),
    ('PathXLike', dict(distractors=9), 'distractors must be an integer from 0 to 8, got 9')])
def test_wrong_difficulties_of_pathfinder_like(name, options, message):
    user_error(lambda: DATASETS.build(dict(type=name, split='train', count=2, **options)), message)


# ---- random fields

@pytest.mark.parametrize('shape', [(64, 64), (48, 96)])
def test_spectrum_of_random_fields(shape):
    made = fields.random_fields(100, *shape, seed=1)
    assert made.shape == (100, *shape) and made.dtype == np.float32
    assert np.abs(made.mean((1, 2))).max() < 1e-5 and np.abs(made.std((1, 2)) - 1).max() < 1e-5
    power = (np.abs(np.fft.fft2(made)) ** 2).mean(0).ravel()[1:]
    frequency = np.hypot(np.fft.fftfreq(shape[0])[:, None], np.fft.fftfreq(shape[1])).ravel()[1:]
    slope, _ = np.polyfit(np.log(frequency), np.log(power), 1)
    assert abs(slope + 2) < 0.15
    steep = fields.random_fields(100, *shape, exponent=3., seed=1)
    power = (np.abs(np.fft.fft2(steep)) ** 2).mean(0).ravel()[1:]
    assert abs(np.polyfit(np.log(frequency), np.log(power), 1)[0] + 3) < 0.15


def test_wrong_fields():
    for arguments in ((0, 8, 8), (1, 0, 8), (1, 1, 1)):
        with pytest.raises(ValueError, match='at least 1'):
            fields.random_fields(*arguments)
