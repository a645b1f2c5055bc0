"""The tables of README, docs and model cards are those that `subquad tables` writes."""
import json

import pytest

from subquad.tools.bench import tables
from subquad.tools.common.cli import UserError

END = '\n<!-- end of table -->\n'


def test_committed_tables_are_up_to_date(capsys):
    assert tables.main(['--check']) == 0, capsys.readouterr().out


def test_outdated_table_is_written_again(tmp_path):
    text = f'<!-- table: counts ppma -->\nold{END}'
    new = tables.updated(text, tmp_path)
    assert '14,335,272' in new and 'old' not in new and 'myo' not in new and tables.updated(new, tmp_path) == new


def test_models_table_leaves_test_models_out(tmp_path):
    rows = tables.content('models', tmp_path).splitlines()[2:]
    assert not any('test_' in row for row in rows)
    assert '| `ppma_tiny` | 224 | 14.3 | 2.70 | 82.6 |' in rows and len(rows) == len(set(rows)) > 10
    families = [tables.content(f'models {family}', tmp_path).splitlines()[2:] for family in tables.FAMILIES]
    assert [row for family in families for row in family] == rows


@pytest.mark.parametrize('marker, message', [
    ('modles', "unknown table 'modles'; did you mean models"),
    ('models lcsm', "one of ppma, mobilevitv2, myo, got 'lcsm'"),
    ('gpu ppma', "'gpu' takes no family"), ('cpu', 'no benchmark records'), ('summary', 'the summary needs a record')])
def test_wrong_marker_raises(marker, message, tmp_path):
    with pytest.raises(UserError, match=message):
        tables.updated(f'<!-- table: {marker} -->\nold{END}', tmp_path)


@pytest.mark.parametrize('text', ['<!-- table: models -->\n', '<!-- end of table -->\n',
                                  f'<!-- table: models -->\n<!-- table: gpu -->\n{END}'])
def test_unpaired_marker_raises(text, tmp_path):
    with pytest.raises(UserError, match='needs its own'):
        tables.updated(text, tmp_path)


def test_newest_record_of_a_preset_is_shown(tmp_path):
    folder = tmp_path / tables.measurements.RECORDS
    folder.mkdir(parents=True)
    record = {'preset': 'ppma_tiny-224', 'times_ms': {}, 'floor': None, 'cpu': 'C', 'threads': 2, 'torch': '2',
              'commit': 'abc', 'date': '2026-12-01'}
    lines = [{**record, 'metrics': [dict(name='m', value=value, unit='x', bound=None, target=None, met=None)]}
             for value in (1.0, 2.0)]
    (folder / 'cpu.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    text = tables.content('cpu ppma', tmp_path)
    assert '| `ppma_tiny-224` | m | 2 x |' in text and '1 x' not in text and 'C, 2 threads, torch 2, commit abc' in text


@pytest.mark.parametrize('line, message', [
    ('{"preset": "ppma_ti', 'cpu.jsonl, line 1: the record is damaged'),
    ('{"preset": "ppma_tiny-224", "figures": []}', "the field 'figures' of a record was renamed to 'metrics'"),
    ('{"preset": "ppma_tiny-225"}', "there is no preset 'ppma_tiny-225'")])
def test_record_that_no_table_can_show_raises(line, message, tmp_path):
    folder = tmp_path / tables.measurements.RECORDS
    folder.mkdir(parents=True)
    (folder / 'cpu.jsonl').write_text(line + '\n')
    with pytest.raises(UserError, match=message):
        tables.content('cpu ppma', tmp_path)
