"""The comparison of mixers: cells that really run, records that are kept, tables, and names that do not exist."""
import json

import pytest
import torch
from helpers import ROOT
from pairwise import slow
from user_errors import command_error, user_error

from lab import compare, mixer_cells, mixer_tables, processes, tables
from lab.distant_copy import IGNORED, DistantCopy, distant_copies
from lab.documents import RECORDS
from lab.flat_network import FlatNetwork
from lab.mixer_tasks import COMPARED, SEEDS, TASKS, Cell, check_names
from subquad.tools.common.cli import UserError

TINY = {'epochs': 1, 'train_dataloader.dataset.count': 64, 'test_dataloader.dataset.count': 32}


def record(task='digits', mixer='tree', seed=0, score=90., recipe='a', **more):
    """A record like those of the command."""
    return {'task': task, 'mixer': mixer, 'seed': seed, 'recipe': recipe, 'score': score, 'step_ms': 20.,
            'peak_mb': 30., 'macs': 5_000_000, 'parameters': 7, 'cell_seconds': 40., 'cpu': 'C', 'threads': 1,
            'torch': '2', 'commit': 'abcdef0123', 'modified': False, 'date': '2026-12-01T10:00:00+00:00', **more}


def failure(reason='the loss is nan at step 3', **more):
    """The record of a cell that failed."""
    kept = record(**more)
    for key in ('score', 'step_ms', 'peak_mb', 'macs', 'parameters'):
        kept.pop(key)
    return {**kept, 'failed': reason}


def write(file, *lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return file


def rows(text):
    """The rows of a Markdown table by mixer, as lists of cells."""
    lines = [line.strip('| ').split(' | ') for line in text.splitlines() if line.startswith('| `')]
    return {line[0].strip('`'): line[1:] for line in lines}


@pytest.fixture
def without_processes(monkeypatch):
    """Replace the training processes; return the cells that they were asked for, and what each one answers."""
    asked, answers = [], {}

    def fake(module, argv, threads):
        cell = Cell(*json.loads(argv[-1])[0])
        asked.append(cell)
        answer = answers.get(cell)
        if isinstance(answer, BaseException):
            raise answer
        return {key: value for key, value in record().items() if key not in (*Cell._fields, 'recipe', 'cell_seconds')}
    monkeypatch.setattr(compare, 'run_in_fresh_process', fake)
    return asked, answers


# ---- tasks and recipes

@pytest.mark.parametrize('task', TASKS)
def test_config_of_a_task_takes_every_mixer(task):
    """All mixers get the same config, but for their name, and the network has the mixer."""
    shape, dtype = {'listops': ((64,), torch.int64), 'digits': ((3, 32, 32), torch.float32)}.get(
        task, ((3, 64, 64), torch.float32))
    counts, configs = {}, []
    for mixer in COMPARED if task == 'copy' else ('identity', 'depthwise', 'attention', 'tree'):
        config = mixer_cells.cell_config(Cell(task, mixer, 1), {})
        assert config.randomness.seed == 1 and config.get('val_dataloader') is None
        counts[mixer] = mixer_cells._counts(config, shape, dtype)
        part = config.model.backbone if TASKS[task].dense else config.model
        assert part.mixers == mixer
        part.mixers = config.randomness.seed = 0
        configs.append(config.to_dict())
    assert counts['identity']['macs'] < counts['depthwise']['macs'] < counts['attention']['macs']
    assert counts['identity']['parameters'] < counts['depthwise']['parameters'] and len(configs) == len(counts)
    assert all(config == configs[0] for config in configs)


def test_recipe_is_of_the_config_and_the_options():
    recipe = mixer_cells.recipe
    assert recipe('copy', {}) == recipe('copy', {}) != recipe('listops', {})
    assert len({recipe('copy', options) for options in (
        {}, {'epochs': 2}, {'epochs': 3}, {'optim_wrapper.optimizer.lr': 1.}, {'model.depth': 3})}) == 5
    user_error(lambda: recipe('copy', {'model.mixers': 'tree'}), 'give --mixers')
    user_error(lambda: recipe('copy', {'randomness.seed': 1}), 'give --seeds')
    user_error(lambda: recipe('copy', {'model.deph': 1}), 'did you mean depth')


def test_wrong_names_and_numbers_are_one_error(tmp_path, without_processes):
    out = ['--out', tmp_path / 'r.jsonl']
    command_error(compare.main, ['--tasks', 'digit', *out], "unknown task 'digit'; did you mean digits", 'pathfinder')
    command_error(compare.main, ['--mixers', 'attention', 'tre', *out], "unknown mixer 'tre'; did you mean tree")
    command_error(compare.main, ['--mixers', 'eos:9-9-9-9', *out], "unknown mixer 'eos:9-9-9-9'")
    command_error(compare.main, ['--seeds', '-1', *out], '--seeds must be from 0')
    command_error(compare.main, ['--cfg-options', 'epochs', *out], '--cfg-options takes KEY=VALUE')
    write(tmp_path / 'failed.jsonl', failure())
    command_error(compare.main, ['--plot', tmp_path / 'p.png', '--out', tmp_path / 'failed.jsonl'], 'no cell to plot')
    check_names(list(TASKS), ['eos:1-1-1-4', *COMPARED], list(SEEDS))
    assert not (tmp_path / 'r.jsonl').exists()


# ---- runs

def test_a_cell_trains_and_its_record_is_whole(tmp_path, capsys):
    """A process of its own; the second call finds the record."""
    file = tmp_path / 'r.jsonl'
    argv = ['--tasks', 'copy', '--mixers', 'identity', '--seeds', '3', '--epochs', '1', '--out', str(file),
            '--cfg-options', *(f'{key}={value}' for key, value in TINY.items() if key != 'epochs'),
            'train_dataloader.batch_size=32']
    assert compare.main(argv) == 0
    line, = map(json.loads, file.read_text().splitlines())
    assert (line['task'], line['mixer'], line['seed'], line['steps']) == ('copy', 'identity', 3, 2)
    assert line['config'] == 'mixers_copy' and line['options']['epochs'] == 1 and line['recipe']
    assert line['score'] == pytest.approx(line['metrics']['accuracy/top1']) and 0 <= line['score'] <= 40
    assert line['parameters'] == 24_824 and line['macs'] > 1e6 and line['step_ms'] > 0 and line['threads'] == 1
    assert line['peak_mb'] is None or line['peak_mb'] > 0
    assert line['torch'] == torch.__version__ and 'commit' in line and 'modified' in line
    assert compare.main(argv) == 0
    assert len(file.read_text().splitlines()) == 1 and '1 of 1 cells are in' in capsys.readouterr().out
    assert compare.main([*argv, '--list']) == 0 and '1/1' in capsys.readouterr().out


@pytest.mark.parametrize('task', ['listops', *slow('pathfinder')])
def test_task_trains_with_a_mixer(task):
    found = mixer_cells.train_cell(Cell(task, 'separable', 0), {**TINY, 'train_dataloader.batch_size': 32})
    assert found['steps'] == 2 and 0 <= found['score'] <= 100 and found['train_loss'] < 3


def test_detector_that_finds_nothing_has_the_score_0(monkeypatch):
    """MMDetection returns no metrics then. Any other task must have its metric."""
    def untrained(config, see_inputs):
        see_inputs(torch.zeros(1, 3, 64, 64))
        return dict(train_loss=1., steps=1, seconds=1., step_ms=1., peak_mb=None)
    monkeypatch.setattr(mixer_cells, 'train_and_test', untrained)
    monkeypatch.setattr(mixer_cells, 'SHAPES', dict(train=2, val=2, size=[64, 64], seed=0))
    pytest.importorskip('mmdet')
    found = mixer_cells.train_cell(Cell('detection', 'identity', 0), {})
    assert found['score'] == 0 and found['metrics'] == {} and found['steps'] == 1
    with pytest.raises(KeyError, match='accuracy/top1'):
        mixer_cells.train_cell(Cell('copy', 'identity', 0), {})


@pytest.mark.slow
@pytest.mark.parametrize('task', ['detection', 'segmentation', 'digits', 'mnist5k'])
def test_task_trains_with_a_mixer_for_an_epoch(task):
    pytest.importorskip('mmseg')
    found = mixer_cells.train_cell(Cell(task, 'depthwise', 0), {'epochs': 1})
    assert 0 <= found['score'] <= 100 and found['step_ms'] > 0 and found['macs'] > 1e6


def test_only_cells_that_the_file_lacks_run(tmp_path, without_processes, capsys):
    asked, answers = without_processes
    file = str(tmp_path / 'r.jsonl')
    argv = ['--tasks', 'digits', 'copy', '--mixers', 'tree', 'eos:tnl', '--out', file]
    assert compare.main([*argv, '--seeds', '0']) == 0
    assert asked == [Cell(task, mixer, 0) for task in ('digits', 'copy') for mixer in ('tree', 'eos:tnl')]
    assert compare.main([*argv, '--seeds', '0', '1', '--jobs', '3']) == 0
    assert len(asked) == 8 and {cell.seed for cell in asked[4:]} == {1}
    compare.main([*argv, '--seeds', '0', '1', '--epochs', '2', '--list'])
    assert '0/2' in capsys.readouterr().out                                   # of another recipe
    compare.main([*argv, '--seeds', '0', '1', '2', '--list'])
    assert '2/3' in capsys.readouterr().out


@pytest.mark.parametrize('error, reason', [
    (UserError('the loss is nan at step 3 | of 7'), 'the loss is nan at step 3 / of 7'),
    (processes.ProcessFailed(1, 'Traceback\nRuntimeError: boom\n'), 'RuntimeError: boom'),
    (processes.ProcessFailed(-9, ''), 'the process was killed')])
def test_failed_cell_is_recorded_shown_and_run_again(error, reason, tmp_path, without_processes, capsys):
    asked, answers = without_processes
    file = tmp_path / 'r.jsonl'
    argv = ['--tasks', 'digits', '--mixers', 'tree', '--seeds', '0', '1', '--out', str(file)]
    answers[Cell('digits', 'tree', 1)] = error
    assert compare.main(argv) == 1
    text = mixer_tables.score_table(file)
    assert rows(text)['tree'][0] == '90.0 (1 seed), 1 failed' and f'`tree` on digits, seed 1: {reason}' in text
    compare.main([*argv, '--list'])
    assert '1/2' in capsys.readouterr().out
    answers.clear()
    assert compare.main(argv) == 0 and asked[2:] == [Cell('digits', 'tree', 1)]
    text = mixer_tables.score_table(file)
    assert rows(text)['tree'][0] == '90.0 ± 0.0 (2 seeds)' and 'Failed' not in text


def test_interruption_is_no_failure_of_a_cell(tmp_path, without_processes):
    _, answers = without_processes
    answers[Cell('digits', 'tree', 0)] = processes.ProcessFailed(130, 'interrupted')
    with pytest.raises(KeyboardInterrupt):
        compare.main(['--tasks', 'digits', '--mixers', 'tree', '--out', str(tmp_path / 'r.jsonl')])
    assert not (tmp_path / 'r.jsonl').exists()


# ---- tables

def test_mean_and_spread_by_hand(tmp_path):
    lines = [record(seed=seed, score=score) for seed, score in enumerate((90., 92., 97.))]
    lines += [record(mixer='identity', score=50., step_ms=10., peak_mb=12., macs=1_000_000),
              record(mixer='eos:lrn', score=1.), failure(mixer='s5', seed=2)]
    file = write(tmp_path / RECORDS / mixer_tables.FILE, *lines)
    found = rows(tables.content('comparison', tmp_path))
    assert found['tree'][0] == '93.0 ± 3.6' and found['identity'][0] == '50.0 (1 seed)'      # sqrt((9 + 1 + 16) / 2)
    assert found['s5'][0] == '1 failed' and found['attention'] == ['not run'] * len(TASKS)
    assert list(found) == [*COMPARED, 'eos:lrn'] and len(found['tree']) == len(TASKS)
    text = tables.content('comparison', tmp_path)
    assert '`s5` on digits, seed 2: the loss is nan' in text
    assert '6 cells. C, 1 thread, torch 2; commit abcdef0; 2026-12-01.' in text
    times, memory, macs = (rows(tables.content(f'comparison_{name}', tmp_path)) for name in ('times', 'memory', 'macs'))
    assert times['tree'][0] == '2.0' and times['identity'][0] == '1.0' and times['s5'][0] == 'failed'
    assert '(1 is 10 ms)' in tables.content('comparison_times', tmp_path)
    assert memory['tree'][0] == '30' and macs['identity'][0] == '1.0' and macs['attention'][1] == 'not run'
    summary = rows(tables.content('comparison_summary', tmp_path))
    assert set(summary) == set(mixer_tables.SUMMARY)
    assert summary['tree'] == ['93.0±3.6', *['not run'] * (len(TASKS) - 1)]
    mixer_tables.plot_costs(file, tmp_path / 'p.png')
    assert (tmp_path / 'p.png').stat().st_size > 5000


def test_recipes_are_not_mixed(tmp_path):
    """A task shows the cells of the recipe that it was last run with."""
    file = write(tmp_path / 'r.jsonl', *(record(seed=seed, recipe='old', score=10.) for seed in SEEDS),
                 record(seed=0, recipe='new', score=80.), record(task='copy', recipe='old', modified=True))
    found = rows(mixer_tables.score_table(file))['tree']
    assert found[0] == '80.0 (1 seed)' and found[list(TASKS).index('copy')] == '90.0 (1 seed)'
    assert 'commit abcdef0, abcdef0 with changes' in mixer_tables.score_table(file)


def test_committed_records_are_of_clean_commits():
    found = mixer_tables.runs(ROOT / RECORDS / mixer_tables.FILE)
    assert all(line['commit'] and not line['modified'] for lines in found.values() for line in lines)


# ---- long-range copy

def test_copies_have_their_color_in_the_opposite_corner():
    images, labels = distant_copies(40, seed=5, size=32, patch=4, classes=5, distractors=3)
    assert images.shape == (40, 3, 32, 32) and (labels != IGNORED).sum((1, 2)).tolist() == [1] * 40
    from lab.distant_copy import colors
    seen = set()
    for image, label in zip(images, labels):
        (row, column), = zip(*(label != IGNORED).nonzero())
        seen.add((row, column))
        here, there = (image[:, 4 * r:4 * r + 4, 4 * c:4 * c + 4].reshape(3, -1).mean(1)
                       for r, c in ((row, column), (7 - row, 7 - column)))
        assert here.min() > 200                                                         # white
        assert abs(colors(5) - there).sum(1).argmin() == label[row, column]
    assert seen == {(0, 0), (0, 7), (7, 0), (7, 7)}
    assert (distant_copies(3, seed=5, size=32, classes=5, distractors=3).images == images[:3]).all()
    items = DistantCopy('test', count=2, size=32)
    assert items[1]['inputs'].shape == (3, 32, 32) and items[1]['label'].shape == (64,) and len(items.classes) == 8
    assert (DistantCopy('train', count=2, size=32)[1]['inputs'] != items[1]['inputs']).any()


@pytest.mark.parametrize('options, message', [
    (dict(size=30), 'size must be a multiple of patch=4'), (dict(size=8), 'size must be an integer of at least 16'),
    (dict(classes=1), 'classes must be an integer of at least 2'), (dict(count=0), 'count must be an integer'),
    (dict(distractors=65), 'distractors at most 64'), (dict(split='tst'), 'split')])
def test_wrong_copies_are_one_error(options, message):
    user_error(lambda: DistantCopy(**{'split': 'train', 'count': 1, **options}), message)


def _copy_network(mixer, **options):
    torch.manual_seed(0)
    return FlatNetwork(mixer, 'places', num_classes=4, dim=24, num_heads=2, **options)


def test_only_a_mixer_sees_the_opposite_corner():
    """The color of a bag of local features is at chance: its label does not depend on the patch at all."""
    for mixer, reached in (('identity', False), ('attention', True), ('polyline', True)):
        image = torch.randn(1, 3, 64, 64, requires_grad=True)
        _copy_network(mixer)(image)[0, -1].sum().backward()
        assert bool(image.grad[..., :4, :4].any()) == reached and image.grad[..., -4:, -4:].any()


def _trained_accuracy(mixer):
    """Percentage of right colors at the labeled places of new images, after a short training."""
    network, (train, test) = _copy_network(mixer), (DistantCopy(split, count, size=40, classes=4)
                                                    for split, count in (('train', 256), ('test', 200)))
    optimizer = torch.optim.AdamW(network.parameters(), 4e-3)
    images, labels = (torch.stack([train[n][key] for n in range(len(train))]) for key in ('inputs', 'label'))
    for step in range(80):
        batch = torch.arange(32) + 32 * step % 256
        loss = torch.nn.functional.cross_entropy(network(images[batch]).flatten(0, 1), labels[batch].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images, labels = (torch.stack([test[n][key] for n in range(len(test))]) for key in ('inputs', 'label'))
    with torch.no_grad():
        known = labels != IGNORED
        return 100 * (network.eval()(images).argmax(-1)[known] == labels[known]).float().mean().item()


@pytest.mark.slow
def test_attention_learns_the_copy_and_a_bag_of_local_features_does_not():
    assert _trained_accuracy('attention') > 90
    assert _trained_accuracy('identity') < 40                                    # chance is 25


def test_padding_counts_not_in_the_mean():
    network = FlatNetwork('identity', vocab_size=18, num_classes=3, depth=1).eval()
    tokens = torch.randint(1, 18, (2, 10))
    network.blocks = torch.nn.Identity()
    padded = torch.nn.functional.pad(tokens, (0, 6))
    torch.testing.assert_close(network(tokens), network(padded))
