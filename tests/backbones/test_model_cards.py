"""Model cards: the same sections in the same order, snippets that run, and rows of the card's own family only."""
import re

import pytest
from helpers import ROOT

FAMILIES = ('ppma', 'mobilevitv2', 'myo')
SECTIONS = ['Usage', 'Weights', 'Results', 'Limits', 'Differences', 'Citation']


def card_text(family):
    return (ROOT / 'model_cards' / f'{family}.md').read_text()


@pytest.mark.parametrize('family', FAMILIES)
def test_sections_are_in_order(family):
    headings = re.findall(r'^## (\w+)', card_text(family), re.MULTILINE)
    assert headings == SECTIONS
    assert '```bibtex\n' in card_text(family)


@pytest.mark.parametrize('family', FAMILIES)
def test_snippet_runs_as_printed(family):
    code, = re.findall(r'```python\n(.*?)```', card_text(family), re.DOTALL)
    names = {}
    exec(code, names)
    assert names['logits'].shape == (1, 1000)
    if 'features' in names:
        assert [tuple(x.shape[2:]) for x in names['features']] == [(84, 125), (42, 63), (21, 32), (11, 16)]


@pytest.mark.parametrize('family', FAMILIES)
def test_tables_list_the_own_family_only(family):
    for kind in ('models', 'dense', 'shapes'):
        table = re.search(rf'<!-- table: {kind} {family} -->\n(.*?)<!-- end of table -->', card_text(family), re.DOTALL)
        if table is None:
            assert (family, kind) == ('myo', 'dense')      # the authors report no detectors or segmenters
            continue
        rows = re.findall(r'^\| `(\S+)` ', table[1], re.MULTILINE)
        assert rows and all(family in name for name in rows)
