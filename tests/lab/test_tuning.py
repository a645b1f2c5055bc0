"""Tuning of launch options, without a GPU: the clock is replaced, and kernels run in Triton's interpreter."""
import json

import pytest
import torch
from pairwise import slow_cases

pytest.importorskip('triton')

from lab import tuning
from lab.candidates import Verdict
from lab.tuning import Problem, tune
from subquad.kernels.common import launch, launch_table
from subquad.kernels.common.launch_table import Key, Launch, Size
from subquad.tools.common.cli import UserError

OWN = Launch(4, 1, None)


def _key(n=0):
    return Key('some_kernel', Size(2, 16, 16 << n))


ONE_ROW = (_key(),)


class Fake:
    """A problem whose launches look up rows; its time and its result depend on the options of the first row."""
    name = 'fake'

    def __init__(self, times, rows=ONE_ROW, broken=(), wrong=()):
        self.times, self.rows, self.broken, self.wrong = times, rows, broken, wrong

    def used(self):
        for trial in reversed(launch_table._trials):
            if self.rows[0] in trial:
                return trial[self.rows[0]]
        return OWN

    def call(self, device):
        def run():
            for row in self.rows:
                for record in launch_table._looked_up:
                    record[row] = OWN
            if self.used() in self.broken:
                raise RuntimeError('out of resource:\nshared memory')
            return torch.full((3,), 2. if self.used() in self.wrong else 1.)
        return run

    def time(self, call):
        call()
        return self.times.get(self.used(), 9.)


def _tune(fake, seconds=100., **options):
    return tune([fake], seconds, device='cpu', time_ms=fake.time, **options)


def test_the_fastest_candidate_wins_by_more_than_the_noise():
    fast = Launch(1, 2, None)
    found = _tune(Fake({OWN: 1., fast: .5}), most=36)
    assert found.winners == {_key(): fast} and found.left == []
    assert found.trials[0] == {'problem': 'fake', 'kernel': 'some_kernel', 'size': [2, 16, 16], 'launch': [4, 1, None],
                               'ms': 1., 'why': None}
    assert _tune(Fake({OWN: 1., fast: .99}), most=36).winners == {_key(): OWN}


def test_what_fails_or_computes_something_else_does_not_win():
    broken, wrong, right = Launch(1, 1, None), Launch(2, 1, None), Launch(8, 1, None)
    found = _tune(Fake({OWN: 4., broken: 1., wrong: 2., right: 3.}, broken=[broken], wrong=[wrong]), most=36)
    assert found.winners == {_key(): right}
    reasons = {tuple(trial['launch']): trial['why'] for trial in found.trials}
    assert reasons[tuple(broken)] == 'RuntimeError: out of resource: shared memory'
    assert reasons[tuple(wrong)] == 'wrong result: error 1 of values up to 1'
    assert all(trial['ms'] is None for trial in found.trials if trial['why'])
    assert tuning._differ([torch.ones(2), torch.empty(0)], [torch.ones(2), torch.empty(0)]) is None


def test_a_row_that_fails_itself_is_replaced_and_a_problem_that_fails_is_recorded():
    class Failing(Fake):
        def call(self, device):
            raise RuntimeError('no such kernel')
    found = tune([Failing({}), Fake({OWN: 1.})], 100, device='cpu', time_ms=lambda call: 1., most=1)
    assert found.trials[0]['why'] == 'RuntimeError: no such kernel' and found.winners == {_key(): OWN}


def test_machine_code_orders_candidates_and_leaves_out_what_spills():
    spills, twice, best = Launch(1, 1, None), Launch(2, 1, None), Launch(8, 1, None)
    bad = {spills: Verdict(stack=8, instructions=1.), twice: Verdict(duplicates=2, instructions=1.),
           best: Verdict(stack=0, instructions=10.)}

    def verdicts(rows, tried):
        return {(_key(), x): bad.get(x, Verdict(stack=0, instructions=20.)) for x in tried[_key()]}
    found = _tune(Fake({OWN: 9., spills: 1., twice: 2., best: 5.}), most=3, verdicts=verdicts)
    assert [tuple(trial['launch']) for trial in found.trials][:2] == [tuple(OWN), tuple(best)]
    assert len(found.trials) == 3 and found.winners == {_key(): best}


def test_each_row_is_tuned_once_with_the_winners_of_those_before():
    first = Launch(1, 1, None)
    fake = Fake({OWN: 2., first: 1.}, rows=(_key(), _key(1)))
    found = tune([fake, fake], 100, device='cpu', time_ms=fake.time, most=36)
    assert set(found.winners) == {_key(), _key(1)} and found.winners[_key()] == first
    assert len(found.trials) == 2 * 36


def test_the_time_limit_keeps_what_was_found():
    seconds = iter(range(1000))
    fake = Fake({OWN: 2., Launch(4, 2, None): 1.}, rows=(_key(), _key(1)))
    found = tune([fake, fake], 10, device='cpu', time_ms=fake.time, clock=lambda: float(next(seconds)))
    assert 2 <= len(found.trials) < 12 and _key() in found.winners and _key(1) not in found.winners
    assert found.left[-1] == 'fake'


def test_winners_become_rows_of_the_target(tmp_path):
    key = Key('polyline_attention_fwd', Size(2, 32, 16))
    path = tmp_path / 'table.json'
    path.write_text(launch_table.formatted(tuning.Tuning({key: Launch(8, 3, 128)}).table('cuda:90')))
    table, shipped = launch_table.read(path), launch_table.read(launch_table.SHIPPED)
    assert table['polyline_attention_fwd'].pop('cuda:90')[key.size] == Launch(8, 3, 128)
    shipped['polyline_attention_fwd'].pop('cuda:90', None)
    assert table['polyline_attention_fwd'] == shipped['polyline_attention_fwd']


@pytest.mark.skipif(not launch.interpreted(), reason='runs kernels in the interpreter')
@pytest.mark.parametrize('op, backward, grid', [
    ('polyline_attention', True, (3, 4)), ('eos_elementwise', False, (1, 40)), *slow_cases(
        ('separable_attention', False, (3, 4)), ('eos_elementwise', True, (3, 4)), ('eos_matmul', True, (2, 3)))])
def test_rows_of_a_real_operator_are_tuned(op, backward, grid):
    problem = Problem(op, grid, 1, 1, 16, torch.float32, backward)
    found = tune([problem], 100, device='cpu', time_ms=lambda call: 1., most=1)
    assert found.winners and all(trial['why'] is None for trial in found.trials)
    assert (op != 'eos_elementwise') or ('eos_elementwise_memory' in {key.kernel for key in found.winners}) != backward
    for key, launch_ in found.winners.items():
        assert key.kernel.startswith(op) and launch_table.find(key, 'interpreter', '') == launch_


@pytest.mark.slow
def test_judging_compiles_in_other_processes(python):
    """One row and two candidates; four warps repeat the work of two."""
    done = python('''
if __name__ == '__main__':
    from subquad.kernels.common.launch_table import Key, Launch, Size
    from lab import tuning
    key = Key('decay_attention_fwd_line', Size(2, 32, 32))
    names = [name for name in tuning.aot.cases() if tuning._case_of(name, key)]
    assert 'decay_attention, additive, lines of 28, bfloat16, 32 channels' in names and len(names) == 8, names
    rows = tuning.rows_of(['decay_attention, additive, lines of 28, bfloat16, 32 channels'], 'cuda:90')
    assert key in rows, rows
    for warps in (2, 4):
        verdict = tuning.judge(key, Launch(warps, 1, None), rows[key], 'cuda:90')
        print(verdict.duplicates, verdict.stack, verdict.instructions, verdict.fits)
''', TRITON_INTERPRET='0')
    assert done.returncode == 0, done.stderr
    few, many = (line.split() for line in done.stdout.splitlines())
    assert few[:2] == ['1', '0'] and few[3] == 'True' and many[0] == '2' and many[3] == 'False'
    assert float(few[2]) < float(many[2])


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_tuning_without_a_gpu_is_one_error(tmp_path):
    with pytest.raises(UserError, match='needs a GPU, and torch finds none here'):
        tuning.main([str(tmp_path / 'table.json')])


def test_the_command_writes_the_table_and_the_trials(tmp_path, monkeypatch, capsys):
    key = Key('polyline_attention_fwd', Size(2, 32, 16))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(launch, 'target', lambda: ('cuda', '90'))
    monkeypatch.setattr(tuning, 'environment', lambda device: {'gpu': 'none'})
    asked = []

    def fake(problems, seconds, verdicts):
        asked.extend([len(problems), seconds])
        return tuning.Tuning({key: Launch(8, 3, None)}, [{'ms': 1.}], ['the rest'])
    monkeypatch.setattr(tuning, 'tune', fake)
    path = tmp_path / 'table.json'
    assert tuning.main([str(path), '--only', '50 x 80', '--seconds', '7']) == 0
    assert asked == [2, 7] and launch_table.read(path)[key.kernel]['cuda:90'][key.size] == Launch(8, 3, None)
    trials = json.loads((tmp_path / 'table.json.trials.json').read_text())
    assert trials['target'] == 'cuda:90' and trials['left'] == ['the rest'] and trials['gpu'] == 'none'
    printed = capsys.readouterr()
    assert 'polyline_attention_fwd [2, 32, 16]: [8, 3, None]' in printed.out and 'no time was left' in printed.out
    with pytest.raises(UserError, match='no problem contains'):
        tuning.main([str(path), '--only', 'nonsense'])
