"""Test that every family checks each of its options at construction, and that the error names the option."""
import inspect

import pytest
import timm
import torch
from families import FAMILIES
from helpers import ROOT

from subquad.backbones import LCSMSequence, MyoSequence
from subquad.backbones.mixers import TreeMixer
from subquad.backbones.options import check, known_options

FAMILIES = {**FAMILIES, 'myo_sequence': MyoSequence, 'lcsm_sequence': LCSMSequence}
# Values that no option accepts; and, by the words in the description of an option, values that are almost accepted.
NEVER = ('yes', '3', float('nan'), float('inf'), [], {}, object(), b'avg', 1j)
BESIDE = {'True or False': (1, 0, 'True', 'False'), 'an integer': (True, 1.0, '1', -2, 1 << 70),
          'a string': (1, 2.5, True), 'a number': (True, '0.1', -0.5, 1e9, [0.1]),
          'one of': (True, 1.5, 32.0, 'AVG', ['avg']),
          'one value for each of 4 stages': (4, (1, 1, 1), (1, 1, 1, -1), (1, 1, 1, '1'), (1, 1, 1, None), '1111',
                                             ('no',) * 4),
          'an integer of at least 32 or a pair': ((64,), (64, 64, 64), 64.0, (64, True), (64, '64'), 0, True, '64')}
CASES = [(name, option) for name, family in FAMILIES.items() for option in known_options(family)]


@pytest.mark.parametrize('name', FAMILIES)
def test_all_arguments_of_a_family_have_bounds(name):
    arguments = {argument for base in FAMILIES[name].__mro__ if base.__name__ in (
        FAMILIES[name].__name__, 'HierarchicalBackbone') for argument in inspect.signature(base).parameters}
    without = {'device', 'dtype', 'kwargs', 'build_mixer', 'mixer_options'}
    passed_on = set(getattr(FAMILIES[name], 'PASSED_ON', {}))
    assert arguments - without | passed_on == set(known_options(FAMILIES[name]))


@pytest.mark.parametrize('name, option', CASES)
def test_values_of_wrong_type_or_out_of_bounds_are_rejected(name, option):
    allowed = known_options(FAMILIES[name])[option]
    words = allowed.allowed if ' ' in allowed.allowed else f'one of {allowed.allowed}'          # with one allowed value
    beside = [values for key, values in BESIDE.items() if key in words]
    assert beside, f'no wrong values for {words}'
    wrong = [value for value in (*NEVER, *(v for values in beside for v in values)) if not allowed.accepts(value)]
    assert len(wrong) > len(NEVER)
    for value in wrong:
        with pytest.raises(ValueError, match=f'^{option} must be .*, got ') as caught:
            timm.create_model(name, **{option: value}, device='meta')
        assert '\n' not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize('name, options, message', [
    ('test_ppma', dict(num_heads=(3, 3, 4, 6)), 'even integer'),
    ('test_ppma', dict(attention=('full', 'full')), 'or a list of 4 of them'),
    ('test_ppma', dict(drop_path_rate=1.0), 'drop_path_rate must be a number from 0 to below 1'),
    ('test_myo', dict(num_heads=(3, 3, 4, 6)), 'multiple of num_heads'),
    ('test_mobilevitv2', dict(width=0.2), 'width must be a number from 0.25 to 2.5, got 0.2'),
    ('test_mobilevitv2', dict(attention='mha', exact_size=True), "exact_size=True requires attention='separable'")])
def test_bounds_and_options_that_do_not_fit_each_other(name, options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, **options)


def test_the_mixer_of_trees_checks_its_options():
    for options, message in ((dict(shift_grid='no'), "shift_grid must be True or False, got 'no'"),
                             (dict(rho='0.5'), "rho must be a number from 0 to 1, got '0.5'")):
        with pytest.raises(ValueError, match=message):
            TreeMixer(8, 2, **options)


def test_linformer_rejects_a_transposed_grid():
    model = timm.create_model('test_mobilevitv2', attention='linformer', img_size=(64, 96), num_classes=3).eval()
    assert model(torch.rand(1, 3, 64, 96)).shape == (1, 3)
    message = r'expects 4 x 6 tokens per group \(rows x columns\), got 6 x 4: create the model'
    with pytest.raises(ValueError, match=message):
        model(torch.rand(1, 3, 96, 64))
    with pytest.raises(ValueError, match='expects 24 tokens per group, got 36'):
        model(torch.rand(1, 3, 96, 96))
    block = model.stages[2][1]
    frame, previous = torch.rand(1, 64, 8, 12), torch.rand(1, 32, 12, 8)
    with pytest.raises(ValueError, match=message):
        block(frame, previous)
    assert block(torch.rand(1, 64, 4, 4), previous.mT).shape == (1, 64, 4, 4)        # the source determines the grid


@pytest.mark.parametrize('options', [{}, dict(attention='mha'), dict(attention='linformer', img_size=64)], ids=str)
def test_a_source_of_another_shape_is_rejected(options):
    block = timm.create_model('test_mobilevitv2', **options).eval().stages[2][1]
    x, frame = torch.randn(2, 64, 8, 8), torch.randn(2, 64, 8, 8)
    tokens = block.forward_tokens(frame)
    assert block(x, tokens).shape == x.shape
    for source in (frame, tokens[:1], tokens[0], tokens[:, :30]):
        with pytest.raises(ValueError, match=r'source must be tokens \(B, C, H, W\) with B=2 and C=32') as caught:
            block(x, source)
        assert str(tuple(source.shape)) in str(caught.value)
    unit = block.transformer[0].attn
    groups = (torch.randn(2, 32, 4, 16), torch.randn(2, 64, 4, 16))
    with pytest.raises(ValueError, match='source must be tokens'):
        unit(*groups)


@pytest.mark.parametrize('name', ['test_ppma', 'test_mobilevitv2', 'test_myo', 'test_lcsm'])
def test_a_classifier_needs_pooling(name):
    with pytest.raises(ValueError, match='needs num_classes=0, got num_classes=5'):
        timm.create_model(name, num_classes=5, global_pool='')
    model = timm.create_model(name, num_classes=0, global_pool='')
    model.reset_classifier(5)                            # as in timm's test suite: the pooling stays
    model.reset_classifier(5, 'avg')
    with pytest.raises(ValueError, match='needs num_classes=0, got num_classes=5'):
        model.reset_classifier(5, '')
    assert model.get_classifier().out_features == 5


@pytest.mark.parametrize('name', [name for name in FAMILIES if name != 'lcsm_sequence'])
def test_reset_classifier_rejects_wrong_arguments(name):
    model = timm.create_model(name, device='meta')
    for wrong, message in (((-1,), 'num_classes must be an integer from 0'), ((True,), 'num_classes must be'),
                           (('5',), "num_classes must be .* got '5'"), ((2.0,), 'num_classes must be'),
                           ((5, 'mean'), "global_pool must be .*'avg'.* got 'mean'")):
        with pytest.raises(ValueError, match=message):
            model.reset_classifier(*wrong)
    assert model.num_classes == (10 if name == 'myo_sequence' else 1000)


@pytest.mark.parametrize('name, wrong, near', [
    ('test_ppma', 'atention', 'attention'), ('test_myo', 'static_edge', 'static_edges'),
    ('test_mobilevitv2', 'exact_sizes', 'exact_size')])
def test_unknown_options_get_a_suggestion(name, wrong, near):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'; did you mean '{near}'"):
        timm.create_model(name, **{wrong: 1})
    with pytest.raises(TypeError, match=f"{FAMILIES[name].__name__} got an unexpected .*; did you mean '{near}'"):
        check(FAMILIES[name].__name__, known_options(FAMILIES[name]), {wrong: 1})


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError, match=r'dims must be one value .*\.\.\.$') as caught:
        timm.create_model('test_ppma', dims=list(range(100_000)))
    assert len(str(caught.value)) < 400


def test_options_accept_lists():
    """JSON and config files give lists instead of tuples."""
    model = timm.create_model('test_ppma', depths=[1, 1, 1, 1], img_size=[64, 96], attention=['crisscross'] * 4)
    assert [len(stage.blocks) for stage in model.stages] == [1, 1, 1, 1]


def test_the_config_of_a_crisscross_classifier_names_its_model():
    config = pytest.importorskip('mmengine').Config.fromfile(
        ROOT / 'configs' / 'classification' / 'ppma-tiny-crisscross_folder.py')
    assert config.model.name == 'ppma_tiny_crisscross' and config.model.label_smoothing == 0.1
