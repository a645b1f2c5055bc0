"""The tables in README and model cards are what the tools compute."""
import pytest

from subquad.tools.bench import tables
from subquad.tools.common.cli import UserError


def test_tables_are_up_to_date(capsys):
    assert tables.main(['--check']) == 0, capsys.readouterr().out


def test_a_stale_or_unknown_table_is_found(tmp_path):
    text = '<!-- table: models -->\nold\n<!-- end of table -->\n'
    new = tables.updated(text, tmp_path)
    assert '14,335,272' in new and 'old' not in new and tables.updated(new, tmp_path) == new
    with pytest.raises(UserError, match="unknown table 'modles'"):
        tables.updated(text.replace('models', 'modles'), tmp_path)
    with pytest.raises(UserError, match='no benchmark records'):
        tables.updated(text.replace('models', 'cpu'), tmp_path)
