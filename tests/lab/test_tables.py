"""The tables of README, docs and model cards are those that `lab.tables` writes."""
import json
import re

import pytest
from helpers import ROOT

import subquad_cli
from lab import claims, tables
from subquad.tools import stats
from subquad.tools.common.cli import UserError
from subquad.tools.engine.config import find

END = '\n<!-- end of table -->\n'


def _counts(page):
    """Whether a page has a table that counts networks, which takes a minute for all pages."""
    return re.search('<!-- table: (models|counts|dense|shapes|own_claims)', page.read_text())


@pytest.mark.parametrize('page', [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * bool(_counts(page)))
                                  for page in tables.pages(ROOT) if '<!-- table: ' in page.read_text()])
def test_committed_tables_are_up_to_date(page):
    assert tables.updated(page.read_text(), ROOT) == page.read_text()


def test_outdated_table_is_written_again(tmp_path, monkeypatch, capsys):
    page, text = tmp_path / 'README.md', f'<!-- table: formats -->\nold{END}'
    page.write_text(text)
    monkeypatch.setattr(tables, 'ROOT', tmp_path)
    assert tables.main(['--check']) == 1 and page.read_text() == text
    tables.main([])
    assert tables.main(['--check']) == 0
    assert 'ONNX Runtime' in page.read_text() and 'old' not in page.read_text()
    assert capsys.readouterr().out.splitlines() == ['out of date: README.md', 'written: README.md',
                                                    'all tables are up to date']


@pytest.mark.slow
def test_models_table_leaves_test_models_out(tmp_path):
    rows = tables.content('models', tmp_path).splitlines()[2:]
    assert not any('test_' in row for row in rows)
    assert '| `ppma_tiny` | 224 | 14.3 | 2.70 | 82.6 |' in rows and len(rows) == len(set(rows)) > 10
    families = [tables.content(f'models {family}', tmp_path).splitlines()[2:] for family in tables.FAMILIES]
    assert [row for family in families for row in family] == rows


@pytest.mark.parametrize('marker, message', [
    *((name, f"there is no table '{name}'; there are") for name in ('modles', 'models resnet', 'gpu ppma')),
    ('cpu', 'no benchmark records'), ('summary', 'the summary needs a record')])
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


def test_a_damaged_record_raises(tmp_path):
    folder = tmp_path / tables.measurements.RECORDS
    folder.mkdir(parents=True)
    (folder / 'cpu.jsonl').write_text('{"preset": "ppma_ti\n')
    with pytest.raises(UserError, match='cannot read .*cpu.jsonl'):
        tables.content('cpu ppma', tmp_path)


def own_claims():
    """(paper, title, row) of every row in the committed files."""
    for paper in claims.PAPERS:
        for table in claims.tables(ROOT, paper):
            for row in claims.rows(ROOT, table):
                yield paper, table['title'].split(':')[0], row


@pytest.mark.slow
def test_counts_of_reported_networks_agree_except_for_known_rows():
    """Figures that are marked as checked here are compared here. Four MACs are known to differ."""
    differing, checked = set(), 0
    for paper, title, row in own_claims():
        checked += sum(claim.mark == claims.CHECKED for claim in row.claims)
        differing |= {(paper, title, row.name.split(':')[0], claim.column) for claim in row.claims
                      if claim.mark == claims.DIFFERS}
    assert checked > 100
    assert differing == {(*row, 'GFLOPs') for row in (
        ('ppma', 'Table 9', 'cross scan'), ('ppma', 'Table 9', 'V2H polyline path'),
        ('mobilevitv2', 'Table 2', 'R11'), ('mobilevitv2', 'Table 2', 'R15'))}


@pytest.mark.slow
def test_every_figure_has_a_mark_with_a_command_or_a_reason():
    for _, title, row in own_claims():
        for claim in row.claims:
            assert claim.mark in claims.MARKS
            if claim.mark in (claims.CHECKED, claims.DIFFERS):
                assert claim.detail.startswith('subquad stats '), (title, row.name)
            elif claim.mark == claims.CANNOT:
                assert claim.detail and 'subquad' not in claim.detail, (title, row.name)


def test_commands_on_the_claims_page_exist(capsys):
    """Commands, configs, models, published weights and options."""
    import timm

    from subquad.backbones.weights.registry import find as published
    commands = set(re.findall(r'`subquad ([^`]*)`', (ROOT / 'docs/tables/claims.md').read_text()))
    assert {words.split()[0] for words in commands} == {'reproduce', 'stats', 'test', 'train'}
    options = {}
    for words in commands:
        command, *rest = words.split()
        if command not in options:
            with pytest.raises(SystemExit):
                subquad_cli.main([command, '--help'])
            options[command] = capsys.readouterr().out
        assert all(word in options[command] for word in rest if word.startswith('--')), words
        if command in ('stats', 'test', 'train') and rest:
            assert timm.is_model(rest[0]) or find(rest[0]).is_file()
        if command == 'reproduce':
            assert published(rest[0]).reported
        if '--model' in rest:
            assert timm.is_model(rest[rest.index('--model') + 1])


@pytest.mark.slow
@pytest.mark.parametrize('paper, row, gmacs', [('mobilevitv2', 'R2: width 0.50, 384 x 384', 1.045),
                                               ('mobilevitv2', 'width 1.50', 4.05), ('ppma', 'without mask', 2.65)])
def test_command_of_a_row_counts_what_the_mark_says(paper, row, gmacs, capsys):
    claim = next(claim for _, _, each in own_claims() if each.name == row
                 for claim in each.claims if claim.column == 'GFLOPs')
    assert claim.mark == claims.CHECKED
    stats.main([*claim.detail.removeprefix('subquad stats ').split(), '--json'])
    counted, = json.loads(capsys.readouterr().out)
    assert counted['macs'] / 1e9 == pytest.approx(gmacs, rel=0.005)
    counts = (counted[key] / 1e9 for key in ('macs', 'macs_without_attention', 'macs_with_norms'))
    assert any(claims.agree(claim.figure, count) for count in counts)


def test_no_figure_that_the_package_has_is_written_again():
    for paper in claims.PAPERS:
        for table in claims.tables(ROOT, paper):
            for entry in table['rows']:
                if 'subject' in entry and not {'size', 'options'} & set(entry):
                    for column, figure in zip(table['columns'], entry.get('figures', [])):
                        spec = table['columns'][column]
                        if 'from' in spec and figure != '=':
                            assert figure != claims.known_figure(ROOT, entry['subject'], spec), (entry['row'], column)


@pytest.mark.parametrize('figure, count, agrees', [
    ('2.7', 2.704, True), ('1.0', 1.0450, True), ('1.0', 1.0551, False), ('18.5', 18.449, True), ('7.5', 7.22, False),
    ('374', 373.4, True), ('43', 43.6, False), ('983', 982.15, True)])
def test_agreement_is_rounding_or_one_percent(figure, count, agrees):
    assert claims.agree(figure, count) == agrees


def claims_file(root, rows, columns='{top-1 (%): {from: top1, check: data}, ms: {cannot: a phone}}', more=''):
    folder = root / claims.CLAIMS
    folder.mkdir(parents=True)
    (folder / 'lcsm.yml').write_text(f"- title: 'Table 1: T'\n  columns: {columns}\n{more}  rows:\n{rows}")


def test_claims_table_follows_its_file(tmp_path):
    claims_file(tmp_path, "  - {row: B, subject: ppma_tiny, figures: ['=', 7]}\n",
                more='  test: subquad test x --model {subject}\n  data: D\n  note: N.\n')
    lines = tables.content('own_claims lcsm', tmp_path).splitlines()
    assert '**Table 1: T.** N. The data are D.' in lines
    assert ('| B | 82.6 | 7 | can be checked with the data: top-1 (`subquad test x --model ppma_tiny`); '
            'cannot be checked: ms (a phone) |') in lines


@pytest.mark.parametrize('row, message', [
    ('{row: B, subject: ppma_tiny, figures: [1, 2, 3]}', 'Table 1: T: B needs 2 figures, got 3'),
    ("{row: B, subject: test_ppma, figures: ['=', 2]}", "test_ppma has no figure 'top1'")])
def test_wrong_claim_raises(row, message, tmp_path):
    claims_file(tmp_path, f'  - {row}\n')
    with pytest.raises(UserError, match=message):
        tables.content('own_claims lcsm', tmp_path)
