"""Sweeps over recurrences: what they train, and the tables of their records."""
import pytest
import torch
from user_errors import user_error

from lab import config_sweeps as sweeps
from lab.config_sweeps import LEARNING_RATE
from lab.documents import read_records
from subquad.tools.data import token_sets
from subquad.tools.engine.classification.model import TimmClassifier
from subquad.tools.engine.config import load
from subquad.tools.engine.records import append


def test_a_sweep_trains_what_the_file_lacks(tmp_path, monkeypatch, capsys):
    trained = []

    def train_once(config, options):
        trained.append(options)
        return {'accuracy/top1': 50., 'train_loss': 1.5, 'steps': 3, 'seconds': 0.1}
    monkeypatch.setattr(sweeps, 'train_once', train_once)
    file = str(tmp_path / 'r.jsonl')
    sweeps.main(['recall', '--record', file, '--cfg-options', 'model.dim=32', 'model.mixer=1-1-1-0'])
    rates = [{'model.mixer': '1-1-1-0', LEARNING_RATE: rate, 'model.dim': 32} for rate in (5e-3, 1e-2)]
    assert trained == rates and 'model.mixer=1-1-1-0' in capsys.readouterr().out
    sweeps.main(['recall', '--record', file, '--cfg-options', 'model.dim=32'])
    assert len(trained) == 8 and trained.count(rates[0]) == 1
    lines = read_records(tmp_path / 'r.jsonl')
    assert len(lines) == 8 and lines[0]['config'] == 'lcsm_mqar-small' and lines[0]['torch'] == torch.__version__
    user_error(lambda: sweeps.main(['recall', '--cfg-options', 'model.tau']), '--cfg-options takes KEY=VALUE')


def test_every_sweep_has_options_that_its_config_takes():
    for sweep in sweeps.SWEEPS.values():
        for options in sweeps.combinations(sweep.options):
            model = load(sweep.config, options).model.to_dict()
            TimmClassifier(**{key: value for key, value in model.items() if key not in ('type', 'num_classes')},
                           num_classes=8, device='meta')


def test_one_run_of_a_sweep():
    small = {'model.dim': 8, 'model.num_heads': 1, 'train_cfg.max_epochs': 1,
             **{f'{part}_dataloader.dataset.count': 128 for part in token_sets.SPLITS}}
    found = sweeps.train_once('lcsm_mqar-small', {'model.mixer': '1-1-1-0', **small})
    assert found['steps'] == 2 and 5 < found['train_loss'] < 6.5 and 0 <= found['accuracy/top1'] < 20
    user_error(lambda: sweeps.train_once('lcsm_mqar-small', {'model.mixr': 'gla'}), 'mixr')


@pytest.mark.parametrize('epochs', ['0', '-1', 'one', '0.5'])
def test_a_sweep_without_steps_is_one_error(epochs, tmp_path):
    file = tmp_path / 'r.jsonl'
    argv = ['recall', '--record', str(file), '--cfg-options', f'train_cfg.max_epochs={epochs}']
    user_error(lambda: sweeps.main(argv), 'train_cfg.max_epochs must be an integer of at least 1, got ')
    assert not file.exists()


def test_tables_of_sweeps(tmp_path):
    def run(mixer, rate, accuracy, **options):
        return {'config': 'lcsm_mqar-small', 'options': {'model.mixer': mixer, LEARNING_RATE: rate, **options},
                'accuracy/top1': accuracy, 'train_loss': 1.}
    text = {'config': 'lcsm_language-stdlib', 'options': {'model.mixer': 'gla'}, 'language/perplexity': 4.06,
            'language/log_likelihood': -1.4, 'train_loss': 1.58}
    runs = [run('1-0-1-0', 0.01, 90.), run('1-0-1-0', 0.005, 97.), run('0-0-0-0', 0.005, 20.), text,
            run('1-0-1-0', 0.005, 95., **{'model.tau': 2})]
    (tmp_path / 'model_cards' / 'benchmarks').mkdir(parents=True)
    for line in runs:
        append(tmp_path / 'model_cards' / 'benchmarks' / 'sweeps.jsonl', line)
    assert sweeps.recall_table(tmp_path).splitlines()[2:] == [
        '| `1-0-1-0` | - | 97.0 % | 1.000 | 0.005 of 0.005, 0.01 |',
        '| `1-0-1-0` | tau=2 | 95.0 % | 1.000 | 0.005 of 0.005 |',
        '| `0-0-0-0` | - | 20.0 % | 1.000 | 0.005 of 0.005 |']
    assert sweeps.language_table(tmp_path).splitlines()[2:] == ['| `gla` | - | 4.06 | 1.580 |']
