"""Model cards: front matter, the same sections, snippets that run, pictures, and rows of the card's own family only."""
import importlib.util
import re

import pytest
import timm
from helpers import ROOT
from huggingface_hub import ModelCard

from lab.tables import FAMILIES

SECTIONS = ['Usage', 'Architecture', 'Weights', 'Results', 'Reproduction', 'Limits', 'Differences', 'Licenses',
            'Citation']
CARDS = [*FAMILIES, 'template/card']


def card_text(family):
    return (ROOT / 'model_cards' / f'{family}.md').read_text()


@pytest.fixture(scope='module')
def pictures():
    """model_cards/draw_architectures.py as a module."""
    spec = importlib.util.spec_from_file_location('pictures', ROOT / 'model_cards' / 'draw_architectures.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize('family', CARDS)
def test_sections_are_in_order(family):
    headings = re.findall(r'^## (\w+)', card_text(family), re.MULTILINE)
    assert headings == SECTIONS
    assert '```bibtex\n' in card_text(family)


@pytest.mark.parametrize('family', CARDS)
def test_front_matter_is_read_by_the_hub(family):
    card = ModelCard.load(ROOT / 'model_cards' / f'{family}.md')
    data = card.data.to_dict()
    assert data['library_name'] == 'timm' and data['pipeline_tag'] == 'image-classification'
    assert data['datasets'] and {'timm', data['pipeline_tag']} <= set(data['tags'])
    licenses = {'mobilevitv2': 'other', 'rmt': 'other', 'mlla': 'mit', 'vmamba': 'mit',
                'vim': 'other', 'mambavision': 'cc-by-nc-sa-4.0'}
    assert data['license'] == licenses.get(family, 'apache-2.0')
    assert (data['license'] == 'other') == ('license_name' in data) == ('license_link' in data)
    assert card.text.lstrip().startswith('# ')
    # The hub finds papers by their links in the text.
    assert data['papers'] and all(f']({paper})' in card.text for paper in data['papers'])


def test_license_is_the_one_that_the_models_name():
    for name in timm.list_models('subquad_mobilevitv2_*'):
        assert timm.get_pretrained_cfg_value(name, 'license') == 'cvnets-license'
    assert 'license_name: cvnets-license\n' in card_text('mobilevitv2')


@pytest.mark.parametrize('family', FAMILIES)
def test_snippet_runs_as_printed(family):
    code, = re.findall(r'```python\n(.*?)```', card_text(family), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 5
    names = {}
    exec(code, names)
    assert names['logits'].shape == (1, 1000)
    if 'features' in names:
        assert [tuple(x.shape[2:]) for x in names['features']] == [(84, 125), (42, 63), (21, 32), (11, 16)]


@pytest.mark.parametrize('family', [family for family in FAMILIES if family != 'vim'])      # it has no stages to draw
def test_picture_shows_the_channels_and_depths_of_the_models(family, pictures):
    figure = pictures.draw(family)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    for variant in pictures.VARIANTS[family]:
        name = pictures.PREFIXES[family] + variant
        model = timm.create_model(name, device='meta')
        assert name in texts
        for info, stage in zip(model.feature_info, model.stages):
            blocks = len(stage.blocks) if hasattr(stage, 'blocks') else sum(
                len(block.transformer) for block in stage if hasattr(block, 'transformer')) or len(stage)
            assert any(text.startswith(f"{info['num_chs']} channels\n") and f'{blocks} ' in text for text in texts)
