"""`subquad logs`: curves of runs, joined where they were resumed."""
import json
import math

import pytest
from PIL import Image
from training_cases import folder_arguments, make_images
from user_errors import command_error

from subquad.tools import logs, train
from subquad.tools.engine.training.run_logs import Point, chosen, read_run, read_runs


def _write(folder, stamp, *lines):
    path = folder / stamp / 'vis_data' / 'scalars.json'
    path.parent.mkdir(parents=True)
    path.write_text(''.join(line if isinstance(line, str) else json.dumps(line) + '\n' for line in lines))
    return folder


def _step(step, epoch=None, **values):
    return dict(lr=0.1 / step, loss=1. / step, **({} if epoch is None else {'epoch': epoch}), iter=step, time=1.,
                step=step, **values)


def test_a_training_and_its_continuation_are_one_curve(tmp_path, capsys):
    """The command reads what subquad train writes."""
    arguments = [make_images(tmp_path / 'data'), tmp_path / 'run', 'default_hooks.logger.interval=1']
    train.main(folder_arguments(*arguments, epochs=1))
    train.main([*folder_arguments(*arguments, epochs=2), '--resume'])
    capsys.readouterr()
    assert logs.main([str(tmp_path / 'run'), '--out', str(tmp_path / 'curves.png'), '--json']) == 0
    found = {row['name']: row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == ['loss', 'lr', 'accuracy/top1']
    assert (found['loss']['unit'], found['loss']['last_step']) == ('iteration', 4)
    assert (found['accuracy/top1']['unit'], found['accuracy/top1']['last_step']) == ('epoch', 2)
    curves = read_run(str(tmp_path / 'run'))
    assert [point.step for point in curves['loss'].points] == [1, 2, 3, 4]
    assert Image.open(tmp_path / 'curves.png').size[0] > 1000


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    _write(tmp_path, '20260101_000000', _step(1, 1), _step(2, 1), {'accuracy/top1': 10., 'step': 1}, _step(3, 2))
    _write(tmp_path, '20260102_000000', {**_step(3, 2), 'loss': 9.}, {'accuracy/top1': 20., 'step': 2})
    run = read_run(str(tmp_path))
    assert run['loss'].points == [Point(1, 1.), Point(2, 0.5), Point(3, 9.)]
    assert run['accuracy/top1'].points == [Point(1, 10.), Point(2, 20.)]
    assert run['accuracy/top1'].unit == 'epoch' and run['loss'].unit == 'iteration'
    assert 'time' not in run and 'iter' not in run


def test_best_and_last_values(tmp_path, capsys):
    """Best is the lowest loss and the highest accuracy; a value that is not finite is never best."""
    lines = [_step(10), {'accuracy/top1': 30., 'language/perplexity': 4., 'step': 10}, {**_step(20), 'loss': math.nan},
             {'accuracy/top1': 20., 'language/perplexity': 5., 'step': 20}, {**_step(30), 'loss': 7.}]
    _write(tmp_path / 'a', '20260101_000000', *lines, '{"loss": 1.')                # killed while it wrote
    keys = ['--keys', 'loss', 'accuracy/top1', 'language/perplexity']
    assert logs.main([str(tmp_path / 'a'), *keys, '--json']) == 0
    found = {row['name']: (row['unit'], row['last'], row['best'], row['best_step'])
             for row in json.loads(capsys.readouterr().out)}
    assert found == {'loss': ('iteration', 7., 0.1, 10), 'accuracy/top1': ('iteration', 20., 30., 10),
                     'language/perplexity': ('iteration', 5., 4., 10)}
    assert logs.main([str(tmp_path / 'a')]) == 0
    assert 'iteration 30' in capsys.readouterr().out


def test_runs_of_the_same_name_and_of_different_metrics(tmp_path, capsys):
    for parent, metric in (('x', 'accuracy/top1'), ('y', 'coco/bbox_mAP')):
        _write(tmp_path / parent / 'run', '20260101_000000', _step(1, 1), {metric: 0.5, 'step': 1})
    folders = [f'{tmp_path}/x/run/', f'{tmp_path}/y/run']
    assert chosen(read_runs(folders), []) == ['loss', 'lr', 'accuracy/top1', 'coco/bbox_mAP']
    assert logs.main([*folders, '--out', str(tmp_path / 'c.png'), '--json']) == 0
    assert {row['run'] for row in json.loads(capsys.readouterr().out)} == {f'{tmp_path}/x/run', f'{tmp_path}/y/run'}


@pytest.mark.parametrize('lines, words', [
    (None, 'has no logs of a run'), ([], 'hold no values yet'), (['{"step"\n', '{"step": 1}\n'], 'line 1 is damaged')])
def test_folders_without_logs(lines, words, tmp_path):
    (tmp_path / 'run').mkdir()
    if lines is not None:
        _write(tmp_path / 'run', '20260101_000000', *lines)
    command_error(logs.main, [tmp_path / 'run'], words)


def test_wrong_arguments(tmp_path):
    _write(tmp_path / 'run', '20260101_000000', _step(1, 1))
    for arguments, words in (([tmp_path / 'none'], 'no folder at'),
                             ([tmp_path / 'run', '--out', 'x.jpg'], 'a PNG file'),
                             ([tmp_path / 'run', '--keys', 'los'], "no run has 'los'; did you mean loss"),
                             ([tmp_path / 'run', '--out', tmp_path / 'no' / 'c.png'], 'cannot write')):
        command_error(logs.main, arguments, words)


def test_a_new_run_in_the_folder_replaces_the_curves_of_the_earlier_one(tmp_path):
    images = make_images(tmp_path / 'data')
    options = [images, tmp_path / 'run', 'default_hooks.logger.interval=1']
    train.main(folder_arguments(*options, epochs=2))
    _rename_log(tmp_path / 'run', '20200101_000000')
    train.main(folder_arguments(*options, 'default_hooks.logger.interval=2', epochs=1))
    curves = read_run(str(tmp_path / 'run'))
    assert [point.step for point in curves['loss'].points] == [2]
    assert [point.step for point in curves['accuracy/top1'].points] == [1]


def test_larger_batches_after_a_resumption_keep_the_earlier_points(tmp_path):
    images = make_images(tmp_path / 'data')
    options = [images, tmp_path / 'run', 'default_hooks.logger.interval=1']
    train.main(folder_arguments(*options, epochs=2))                             # 2 steps an epoch
    _rename_log(tmp_path / 'run', '20200101_000000')
    train.main([*folder_arguments(*options, 'train_dataloader.batch_size=8', epochs=3), '--resume'])
    curves = read_run(str(tmp_path / 'run'))
    assert [point.step for point in curves['loss'].points] == [0.5, 1, 1.5, 2, 3]
    assert [point.step for point in curves['accuracy/top1'].points] == [1, 2, 3]


def _rename_log(work, name):
    """Names of logs have seconds, in which the next run can start."""
    log, = (path for path in work.iterdir() if path.is_dir() and (path / 'vis_data').is_dir())
    log.rename(work / name)
