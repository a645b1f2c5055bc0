"""Hybrids: `mixers` and `attention_share` choose the token mixer of each stage and block by name."""
import copy
import pickle
import warnings

import pytest
import timm
import torch
from families import SKELETON
from helpers import assert_close
from pairwise import slow
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounter

from subquad.backbones import Myo
from subquad.backbones.hierarchical import HierarchicalBackbone
from subquad.backbones.mixers import EosMixer, PolylineMixer, TreeMixer
from subquad.backbones.mixers.choices import MIXERS, attention_blocks, find_mixer
from subquad.backbones.mixers.depthwise import DepthwiseMixer
from subquad.backbones.mixers.eos_codes import ACTIVATIONS, PRESETS
from subquad.backbones.mixers.separable import SeparableMixer
from subquad.backbones.weights import WeightsError, load_weights

NAMES = (*MIXERS, 'eos:1-1-1-4', 'eos:mamba')
# Each mixer once, in networks of four stages.
QUARTERS = [('tree', 'tree-skew', 'polyline', 'attention'), ('separable', 'depthwise', 'polyline-linear', 'identity'),
            ('eos:1-1-1-4', 's5', 'tree-symmetric', 'polyline-multiplicative'),
            ('polyline-crisscross', None, 'eos', 'depthwise')]


def hybrid(name='test_ppma', **options):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=7, **options).eval()


def kinds(model):
    return [type(mixer).__name__ for mixer in model.mixers().values()]


@pytest.mark.parametrize('name', NAMES)
def test_a_mixer_maps_any_grid_and_has_a_gradient(name):
    torch.manual_seed(0)
    mixer = find_mixer(name)(stage=0, block=1, dim=12, num_heads=2)
    for height, width in ((1, 1), (3, 1), (5, 7)):
        x = torch.randn(2, height, width, 12, requires_grad=True)
        y = mixer(x)
        assert y.shape == x.shape
        y.square().sum().backward()
        assert x.grad.isfinite().all() and x.grad.any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
    # All but the identity let a token depend on its neighbor.
    x = torch.randn(1, 4, 4, 12, requires_grad=True)
    mixer(x)[0, 1, 1].sum().backward()
    assert bool(x.grad[0, 1, 2].any()) == (name != 'identity')


CODES = [f'eos:{code}' for code in (*PRESETS, *(f'1-{o}-1-{o % 8}' for o in range(13)), '0-1-0-1-3',
                                    *(f'1-10-1-{activation}' for activation in ACTIVATIONS))]


@pytest.mark.parametrize('name', dict.fromkeys([*MIXERS, *CODES]))
def test_a_mixer_can_be_pickled_and_copied(name):
    torch.manual_seed(0)
    mixer = find_mixer(name)(stage=0, block=1, dim=8, num_heads=2).eval()
    x = torch.randn(1, 3, 2, 8)
    y = mixer(x)
    for other in (pickle.loads(pickle.dumps(mixer)), copy.deepcopy(mixer)):
        assert type(other) is type(mixer) and torch.equal(other(x), y)


@pytest.mark.parametrize('name, options', [
    *((name, {}) for name in SKELETON), ('test_lcsm', dict(mixer='mamba')), ('test_lcsm', dict(mixer='1-10-1-0')),
    ('test_ppma', dict(mixers=('tree', None, 'eos:retnet', 'separable'), attention_share=0.25))])
def test_a_model_can_be_saved_whole(name, options, tmp_path):
    model, x = hybrid(name, **options), torch.randn(1, 3, 64, 64)
    torch.save(model, tmp_path / 'model.pt')
    assert torch.equal(torch.load(tmp_path / 'model.pt', weights_only=False)(x), model(x))


def test_the_names_select_these_mixers():
    def build(name, block=0):
        return find_mixer(name)(stage=0, block=block, dim=8, num_heads=2)

    for name, mask_mode, attention, paths in (
            ('polyline', 'additive', 'full', 'both'),
            ('polyline-multiplicative', 'multiplicative', 'full', 'both'),
            ('polyline-crisscross', 'additive', 'crisscross', 'both'),
            ('polyline-linear', 'additive', 'linear', 'both'),
            ('attention', 'additive', 'full', 'none')):
        mixer = build(name)
        assert (mixer.mask_mode, mixer.attention, mixer.paths) == (mask_mode, attention, paths)
    for name in ('laplacian', 'symmetric', 'skew'):
        first, second = (build('tree' if name == 'laplacian' else f'tree-{name}', block) for block in (0, 1))
        assert first.parametrization == name and (first.shift_grid, second.shift_grid) == (False, True)
    assert {name: build(name).mixer for name in ('eos', 's5', 'eos:gla', 'eos:1-1-1-4')} == {
        'eos': 'gla', 's5': 's5', 'eos:gla': 'gla', 'eos:1-1-1-4': '1-1-1-4'}


def test_attention_is_softmax_attention_with_the_layers_projections_and_lepe():
    torch.manual_seed(0)
    mixer = find_mixer('attention')(stage=0, block=0, dim=8, num_heads=1)
    x = torch.randn(1, 3, 2, 8)
    rope = PolylineMixer(8, 1, paths='none').queries_and_keys(mixer.q(x), mixer.k(x))
    v = mixer.v(x)
    weights = (rope[0] @ rope[1].transpose(2, 3)).softmax(-1)
    y = (weights @ v.reshape(1, 1, 6, 8)).reshape(x.shape) + mixer.lepe(v)
    assert_close(mixer(x), mixer.out(y))


def test_separable_attention_has_one_context_of_all_tokens():
    torch.manual_seed(0)
    mixer = SeparableMixer(6)
    x = torch.randn(2, 3, 5, 6)
    flat = x.reshape(2, 15, 6)
    query, key, value = (flat @ mixer.qkv_proj.weight.flatten(1).T + mixer.qkv_proj.bias).split([1, 6, 6], -1)
    y = value.relu() * (query.softmax(1) * key).sum(1, keepdim=True)
    expected = y @ mixer.out_proj.weight.flatten(1).T + mixer.out_proj.bias
    assert_close(mixer(x), expected.reshape(x.shape))


def test_the_depthwise_mixer_is_a_convolution_between_linear_layers():
    torch.manual_seed(0)
    mixer = DepthwiseMixer(6)
    x = torch.randn(2, 3, 5, 6)
    hidden = torch.nn.functional.gelu(mixer.value(x)).permute(0, 3, 1, 2)
    hidden = torch.nn.functional.conv2d(hidden, mixer.conv.weight, mixer.conv.bias, padding=3, groups=6)
    assert_close(mixer(x), mixer.out(hidden.permute(0, 2, 3, 1)))


@pytest.mark.parametrize('name', SKELETON)
def test_mixers_replace_those_of_the_family_and_nothing_else(name):
    plain, hybrids = hybrid(name), hybrid(name, mixers=('tree', 'eos', 'polyline', 'attention'))
    assert kinds(hybrids) == ['TreeMixer', 'EosMixer', 'PolylineMixer', 'PolylineMixer', 'PolylineMixer']
    assert hybrids.hybrid_options == {'mixers': ('tree', 'eos', 'polyline', 'attention')} and not plain.hybrid_options

    def rest(model):
        return {key: value.shape for key, value in model.state_dict().items() if '.mixer.' not in key}
    assert rest(plain) == rest(hybrids)
    x = torch.randn(2, 3, 50, 70)
    assert hybrids(x).shape == (2, 7)
    assert [f.shape for f in hybrids.forward_intermediates(x, intermediates_only=True)] == [
        f.shape for f in plain.forward_intermediates(x, intermediates_only=True)]
    one = hybrid(name, mixers='depthwise')
    assert set(kinds(one)) == {'DepthwiseMixer'}


def test_none_keeps_the_mixer_of_the_family():
    model = hybrid('test_myo', mixers=(None, 'separable', None, 'attention'), parametrization='skew')
    assert kinds(model) == ['TreeMixer', 'SeparableMixer', 'TreeMixer', 'TreeMixer', 'PolylineMixer']
    assert {mixer.parametrization for mixer in model.mixers(TreeMixer).values()} == {'skew'}
    plain = {key: value.shape for key, value in hybrid('test_ppma').state_dict().items()}
    for options in (dict(mixers=None), dict(mixers=[None] * 4), dict(attention_share=0)):
        assert {key: value.shape for key, value in hybrid('test_ppma', **options).state_dict().items()} == plain


def test_a_family_of_ones_own_takes_names_too():
    model = HierarchicalBackbone(find_mixer('identity'), (16,) * 4, (1,) * 4, (1,) * 4, (1,) * 4,
                                 mixers=('tree', None, None, None))
    assert kinds(model) == ['TreeMixer', 'Identity', 'Identity', 'Identity']


@pytest.mark.parametrize('depth, share, blocks', [
    (8, 0, []), (8, 0.125, [7]), (8, 0.25, [3, 7]), (8, 0.5, [1, 3, 5, 7]), (8, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
    (5, 0.4, [1, 4]), (1, 0.5, [0]), (1, 0.4, []), (3, 0.5, [0, 2]), (2, 0.25, [1])])
def test_attention_blocks_are_spread_with_the_last_first(depth, share, blocks):
    assert attention_blocks(depth, share) == blocks


def test_attention_share_replaces_blocks_of_every_stage():
    model = timm.create_model('myo_tiny', attention_share=0.25, device='meta')             # depths 2, 2, 8, 2
    attention = [name for name, mixer in model.mixers().items() if isinstance(mixer, PolylineMixer)]
    assert attention == [f'stages.{n}.blocks.{m}' for n, m in ((0, 1), (1, 1), (2, 3), (2, 7), (3, 1))]
    assert {model.get_submodule(name).mixer.paths for name in attention} == {'none'}
    both = timm.create_model('lcsm_tiny', mixers='tree', attention_share=0.5, device='meta')
    assert kinds(both).count('TreeMixer') == kinds(both).count('PolylineMixer') == 7


@pytest.mark.parametrize('wrong', ['trees', 'eos:', 'eos:9-9-9-9', 'eos:polyline', 'Tree', ('tree',) * 3,
                                   ('tree', 'tree', 'tree', 'nix'), 3])
def test_a_wrong_name_lists_the_names_that_are_allowed(wrong):
    with pytest.raises(ValueError, match="^mixers must be one of 'polyline', .* or 'eos:' with a preset") as caught:
        timm.create_model('test_ppma', mixers=wrong, device='meta')
    assert all(repr(name) in str(caught.value) for name in MIXERS) and '\n' not in str(caught.value)


@pytest.mark.parametrize('name, options, unused', [
    ('test_ppma', dict(attention_share=0.1), 'attention_share=0.1'),
    ('test_myo', dict(mixers='tree', parametrization='skew'), "parametrization='skew'"),
    ('test_ppma', dict(mixers=('tree',) * 4, attention='linear'), "attention='linear'"),
    ('test_lcsm', dict(mixers='eos', mixer='mamba'), "mixer='mamba'"),
    ('test_ppma', dict(attention_share=1, paths='v2h', mask_mode='multiplicative'),
     "paths='v2h', mask_mode='multiplicative'"),
    ('test_myo', dict(attention_share=0.75, parametrization='skew'), "parametrization='skew'"),
    ('test_myo', dict(attention_share=1, mixers='tree'), "mixers='tree'"),
    ('test_myo', dict(attention_share=1, mixers=(None, 'eos', 'attention', None)), r"mixers\[1\]='eos'"),
    ('test_myo', dict(mixers=['tree', None, 'tree', None], attention_share=0.5), r"mixers\[0\]='tree'"),
    ('test_myo', dict(mixers='attention', attention_share=.5), 'attention_share=0.5'),
    ('test_myo', dict(mixers=(None, 'tree', 'tree', 'tree'), max_levels=2, shifted_blocks=False, attention_share=0.5),
     r"mixers\[1\]='tree', mixers\[3\]='tree', shifted_blocks=False, max_levels=2"),
])
def test_options_without_an_effect_get_a_warning(name, options, unused):
    with pytest.warns(UserWarning, match=f'^{unused} without effect: mixers=.* leave no such block') as caught:
        timm.create_model(name, device='meta', **options)
    assert len(caught) == 1 and '\n' not in str(caught[0].message)


def test_options_of_a_single_block_that_attention_leaves_apply():
    """With a share of 0.5, only the first block of stage 3 of the small networks is not attention."""
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model = hybrid('test_ppma', attention_share=0.5, paths='v2h')
    assert [mixer.paths for mixer in model.mixers().values()] == ['none', 'none', 'v2h', 'none', 'none']
    for mixers in ('tree', (None, None, 'tree', 'attention')):
        assert [type(mixer) for mixer in hybrid('test_lcsm', attention_share=0.5, mixers=mixers).mixers().values()] == [
            PolylineMixer, PolylineMixer, TreeMixer, PolylineMixer, PolylineMixer]


def test_weights_of_other_mixers_are_refused(tmp_path):
    file = str(tmp_path / 'plain.safetensors')
    save_file(hybrid('test_ppma').state_dict(), file)
    overlay = dict(file=file, num_classes=7)
    for options in (dict(mixers='tree'), dict(mixers=('depthwise', None, None, None)), dict(attention_share=0.5)):
        for extra in ({}, dict(features_only=True)):
            with pytest.raises(WeightsError, match='not a checkpoint of this test_ppma: .*not in the model.*the model '
                                                   'has .*, and loads only files that were trained with the same'):
                hybrid('test_ppma', pretrained=True, pretrained_cfg_overlay=overlay, **options, **extra)
    model = hybrid('test_ppma', mixers='tree')
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightsError, match="the model has mixers='tree'"):
        load_weights(model, file)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_published_weights_are_refused_even_if_all_keys_match():
    for name, options in (('ppma_tiny', dict(mixers='polyline')), ('ppma_tiny.in1k', dict(attention_share=1.0)),
                          ('ppma_tiny', dict(mixers='tree', features_only=True))):
        with pytest.raises(WeightsError, match='ppma_tiny.in1k was trained with the mixers of ppma_tiny and does not'):
            timm.create_model(name, pretrained=True, device='meta', **options)
    with pytest.raises(WeightsError, match="does not fit mixers='polyline'"):
        load_weights(timm.create_model('ppma_tiny', mixers='polyline', device='meta'), 'subquad://ppma_tiny.in1k')


def test_a_hybrid_loads_its_own_weights(tmp_path):
    file = str(tmp_path / 'hybrid.safetensors')
    model = hybrid('test_lcsm', mixers=QUARTERS[0], attention_share=0.25)
    save_file(model.state_dict(), file)
    loaded = hybrid('test_lcsm', mixers=QUARTERS[0], attention_share=0.25, pretrained=True,
                    pretrained_cfg_overlay=dict(file=file, num_classes=7))
    x = torch.randn(1, 3, 64, 64)
    assert_close(loaded(x), model(x))


@pytest.mark.parametrize('mixers', [QUARTERS[0], *slow(*QUARTERS[1:])], ids=str)
def test_hybrids_compile_export_and_trace(mixers):
    model, x = hybrid(mixers=mixers, depths=(1, 1, 1, 1)), torch.randn(2, 3, 64, 64)
    expected = model(x)
    counter = CompileCounter()
    assert_close(torch.compile(model, backend=counter, fullgraph=True)(x), expected, 1e-4)
    assert counter.frame_count == 1
    program = torch.export.export(model, (x,))
    assert_close(program.module()(x), expected, 1e-4)
    assert not any('subquad' in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize('mixers', QUARTERS, ids=str)
def test_hybrids_keep_timms_contract(mixers):
    model, x = hybrid(mixers=mixers), torch.randn(2, 3, 64, 64)
    traced = timm.models.create_feature_extractor(model, {'stages.1': 'y'})                # by torch.fx
    assert_close(traced(x)['y'], model.forward_intermediates(x, [1], intermediates_only=True)[0])
    model.train()
    results = []
    for enable in (False, True):
        copied = copy.deepcopy(model)
        copied.set_grad_checkpointing(enable)
        copied(x).square().sum().backward()
        results.append([p.grad for p in copied.parameters()])
    for expected, checkpointed in zip(*results):
        assert_close(checkpointed, expected, 1e-4)
    half = timm.create_model('test_ppma', mixers=mixers, device='meta', dtype=torch.bfloat16)
    assert {p.device.type for p in half.parameters()} == {'meta'}


def test_weight_decay_spares_the_decays_of_all_mixers():
    model = timm.create_model('test_lcsm', mixers=('polyline', 'tree', 'eos:mamba', None), device='meta')
    ends = {name.split('.', 1)[1].split('.mixer.')[1] for name in model.no_weight_decay()}
    assert {'decay.A_log', 'decay.dt_bias', 'edge_bias', 'recurrence.A_log'} <= ends
    plain = timm.create_model('test_ppma', device='meta').no_weight_decay()
    assert {name.split('.')[-1] for name in plain} == {'A_log', 'dt_bias'} and len(plain) == 10


def test_methods_of_a_family_use_the_blocks_of_its_mixer():
    x = torch.randn(1, 3, 64, 64)
    mixed = ('tree', 'eos', 'polyline', 'attention')
    assert list(hybrid('test_myo', mixers=mixed).influences(x)) == ['stages.0.blocks.0']
    assert list(hybrid('test_lcsm', mixers=mixed).state_decays(x)) == ['stages.1.blocks.0']
    assert set(hybrid('test_ppma', mixers=mixed).mixers(EosMixer)) == {'stages.1.blocks.0'}
    with pytest.raises(ValueError, match='no block of this Myo has a TreeMixer'):
        hybrid('test_myo', mixers='attention').influences(x)
    assert isinstance(hybrid('test_myo', mixers='tree'), Myo)
