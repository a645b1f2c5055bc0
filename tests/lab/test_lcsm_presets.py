"""What `subquad benchmark` measures of the recurrences: growth with the length of lines, and operators over rows."""
import pytest
import torch

from lab.growth import line_growth
from lab.line_memory import FORMS, line_memory
from lab.presets import DEFAULTS, PRESETS
from subquad.tools.bench import operators
from subquad.tools.bench.comparisons import compare_operator

KINDS = ('rank one', 'full rank', 'delta rule')


def test_growth_gives_a_record():
    record = line_growth(1, lengths=(8, 16), keys=2, dim=2)
    assert set(record['times_ms']) == {f'{kind} {length}' for kind in KINDS for length in (8, 16)}
    assert all(0 < t['p20'] <= t['p50'] <= t['p80'] for t in record['times_ms'].values())
    assert [m['name'] for m in record['metrics']] == [f'{kind}: growth exponent of time over tokens' for kind in KINDS]
    assert all(m['met'] == (m['value'] <= 1.2) for m in record['metrics'])


def test_memory_gives_a_record():
    record = line_memory(1, length=70, keys=2, dim=3)
    assert list(record['peak_mb']) == [name for kind in FORMS for name in (kind, f'{kind}, materialized')]
    shares = [m for m in record['metrics'] if m['bound']]
    assert [m['name'].split(':')[0] for m in shares] == list(FORMS) and all(m['target'] == 1 / 8 for m in shares)
    preset = PRESETS['eos-memory']
    assert 'eos-memory' in DEFAULTS and preset.options == dict(length=4096, keys=32, dim=64)
    assert preset.targets == dict(max_share=1 / 8)


@pytest.mark.parametrize('kind', FORMS)
def test_forms_that_store_all_memories_compute_the_same(kind):
    form = FORMS[kind]
    inputs = [x.to(torch.complex128 if x.is_complex() else torch.float64) for x in form.inputs(70, 3, 4)]
    torch.testing.assert_close(form.output(*inputs), form.materialized(*inputs))


@pytest.mark.long
def test_time_grows_with_the_length():
    """Processor time of one thread, from 1,024 to 16,384 tokens. The best of three attempts counts, because programs
    share the caches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [line_growth(3, lengths=(1024, 16384))['metrics'] for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    for attempts in zip(*found):
        assert min(m['value'] for m in attempts) <= 1.2, attempts


@pytest.mark.parametrize('op', ['eos_elementwise', 'eos_matmul'])
def test_operators_run_over_rows(op):
    record = compare_operator(1, op=op, grid=(3, 4), heads=2, dim=4, names=('portable', 'reference'))
    assert set(record['times_ms']) == {'portable', 'reference', 'gemm', 'copy'}
    inputs = [x.double() for x in operators.OPERATORS[op].inputs(2, 2, (3, 4), 4)]
    y = operators.operator_call(op, 'portable')(*inputs)
    # A change of one row changes no other.
    inputs[0][:, :, 1] += 1
    changed = (operators.operator_call(op, 'portable')(*inputs) - y).abs().amax((0, 1, 3, 4))
    assert changed[1] > 0.1 and changed[[0, 2]].max() == 0
    assert 'fla' in operators.implementations(op) and 'fla' not in operators.available(op, inputs)
