"""Test Vim against the published network: parameters, MACs, outputs, gradients, image sizes, weight files and slips."""
import argparse
import json
import warnings

import pytest
import timm
import torch
from helpers import DATA, assert_close, relative_error
from pairwise import slow
from safetensors import safe_open

from subquad import kernels
from subquad.backbones.vim import Vim, put_in_middle, resize_pos_embed, take_from_middle
from subquad.backbones.weights import WeightsError, load_state_dict, load_weights
from subquad.tools.engine.counting.counts import count

GOLDEN = sorted(path.name for path in DATA.glob('vim_*.safetensors'))
PARAMETERS = {'vim_tiny': 7_148_008, 'vim_tiny_stride8': 7_250_344, 'vim_small': 25_796_584,
              'vim_small_stride8': 26_001_256, 'vim_base': 97_598_440}
GMACS = {'vim_tiny': 1.293, 'vim_tiny_stride8': 4.790, 'vim_small': 4.852, 'vim_small_stride8': 17.977,
         'vim_base': 18.767}
# Tokens x channels x directions x states of all layers.
ELEMENTS = {'vim_tiny': 58.1e6, 'vim_tiny_stride8': 215e6, 'vim_small': 116e6, 'vim_small_stride8': 431e6,
            'vim_base': 232e6}


@pytest.mark.parametrize('name', ['vim_tiny', *slow('vim_tiny_stride8', 'vim_small', 'vim_small_stride8', 'vim_base')])
def test_parameters_and_macs_equal_the_published_ones(name):
    row = count(name, 224, 224)
    assert row['parameters'] == PARAMETERS[name]
    # A scan is counted with three products for each token, channel, direction and state.
    assert (row['macs'] - 3 * ELEMENTS[name]) / 1e9 == pytest.approx(GMACS[name], rel=0.01)


def _golden(name):
    with safe_open(DATA / name, 'pt') as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()['config'])


def _part(golden, prefix):
    return {key.removeprefix(prefix): value for key, value in golden.items() if key.startswith(prefix)}


def _network(golden, config, **kwargs):
    options = dict(dim=config['embed_dim'], depth=config['depth'], patch_size=config['patch_size'],
                   stride=config['stride'], class_token=config['if_cls_token'], img_size=config['img_size'],
                   num_classes=config['num_classes'])
    model = Vim(**{**options, **kwargs}).eval()
    model.load_state_dict(_part(golden, 'state/'))
    return model


@pytest.mark.parametrize('backend', ['reference', 'portable', 'export'])
@pytest.mark.parametrize('name', GOLDEN)
def test_outputs_and_gradients_equal_those_of_the_published_network(name, backend):
    golden, config = _golden(name)
    model, image = _network(golden, config), golden['input'].requires_grad_()
    with kernels.use_backend(backend):
        features, layers = model.forward_intermediates(image, output_fmt='NLC', return_prefix_tokens=True)
        logits = model(image)
        (logits * golden['cotangent']).sum().backward()
    for n, layer in enumerate(layers, 1):
        tokens = put_in_middle(*layer) if config['if_cls_token'] else layer
        assert_close(tokens, golden[f'hidden{n}'] + golden[f'residual{n}'], 2e-5, f'layer {n}')
    assert_close(features, golden['features'], 2e-5, 'features')
    assert_close(logits, golden['logits'], 2e-5, 'logits')
    gradients = _part(golden, 'grad/')
    assert_close(image.grad, gradients.pop('input'), 1e-4, 'input')
    expected, parameters = model.translate_checkpoint(gradients), dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    for key, value in parameters.items():
        assert_close(value.grad, expected[key], 1e-4, key)


# ---- image sizes

def test_the_class_token_stays_in_the_middle():
    tokens = torch.arange(12.).view(1, 6, 2)
    with_class = put_in_middle(tokens, -torch.ones(1, 1, 2))
    assert with_class[0, :, 0].tolist() == [0, 2, 4, -1, 6, 8, 10]
    assert all(map(torch.equal, take_from_middle(with_class), (tokens, -torch.ones(1, 1, 2))))
    model = timm.create_model('vim_tiny_stride8', device='meta')
    assert model.stem.grid == (27, 27) and model.stem.pos_embed.shape == (1, 730, 192)
    assert (model.stem.pos_embed.shape[1] - 1) // 2 == 364


def test_position_embeddings_are_resized_around_the_row_of_the_class_token():
    """The authors' code takes the first row for the class token's, which shifts half of the grid by one."""
    rows, columns = torch.meshgrid(torch.arange(5.), torch.arange(4.), indexing='ij')
    grid = put_in_middle(torch.stack([rows, columns], -1).view(1, 20, 2), torch.full((1, 1, 2), 100.))
    patches, own = take_from_middle(resize_pos_embed(grid, (5, 4), (10, 12)))
    assert own.unique() == 100 and patches.shape == (1, 120, 2)
    inner = patches.view(10, 12, 2)[3:-3, 4:-4]         # bicubic resizing nearly keeps a ramp
    expected = torch.stack(torch.meshgrid((torch.arange(3, 7) + .5) / 2 - .5, (torch.arange(4, 8) + .5) / 3 - .5,
                                          indexing='ij'), -1)
    assert_close(inner, expected, 0.03)
    assert resize_pos_embed(grid, (5, 4), (5, 4)) is grid
    plain = take_from_middle(grid)[0]
    assert_close(resize_pos_embed(plain, (5, 4), (10, 12), class_token=False), patches, 0)


@pytest.mark.parametrize('size', [(33, 47), (96, 64), (64, 64)])
def test_any_size_works_as_if_the_model_had_been_built_for_it(size):
    torch.manual_seed(0)
    model, x = timm.create_model('test_vim', num_classes=5).eval(), torch.randn(2, 3, *size)
    with torch.no_grad():
        expected, maps = model(x), model.forward_intermediates(x, intermediates_only=True)
        assert all(y.shape == (2, 64, size[0] // 16, size[1] // 16) for y in maps)
        model.set_input_size(size)
        assert model.stem.grid == (size[0] // 16, size[1] // 16)
        assert_close(model(x), expected)
    assert timm.create_model('test_vim', img_size=size).stem.pos_embed.shape == model.stem.pos_embed.shape
    with pytest.raises(ValueError, match='img_size must be an integer of at least 32'):
        model.set_input_size(16)


def test_pooling():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    model = timm.create_model('test_vim', num_classes=5).eval()
    patches, token = take_from_middle(model.forward_features(x))
    assert_close(model.forward_head(model.forward_features(x), pre_logits=True), token[:, 0])
    model.reset_classifier(5, 'avg')
    assert_close(model(x), model.head.fc(patches.mean(1)))
    with pytest.raises(ValueError, match="global_pool='token' needs class_token=True; without .* use 'avg'"):
        timm.create_model('test_vim', class_token=False, global_pool='token')


# ---- slips between the paper and the code

@pytest.mark.parametrize('wrong', ['swapped', 'causal', 'first'])
def test_swapped_directions_and_another_place_of_the_class_token_are_far_off(wrong, monkeypatch):
    golden, config = _golden('vim_stride8_nonsquare.safetensors')
    model = _network(golden, config)
    for layer in model.stages:
        if wrong == 'swapped':
            layer.mixer.right, layer.mixer.left = layer.mixer.left, layer.mixer.right
            layer.mixer.right.scan.paths, layer.mixer.left.scan.paths = ('right',), ('left',)
            layer.mixer.right.conv.reverse, layer.mixer.left.conv.reverse = False, True
        if wrong == 'causal':                            # the second convolution must see the tokens after its own
            layer.mixer.left.conv.reverse = False
    if wrong == 'first':
        monkeypatch.setattr('subquad.backbones.vim.put_in_middle', lambda x, row: torch.cat([row, x], 1))
    with torch.no_grad():
        assert relative_error(model(golden['input']), golden['logits']) > 0.05


def test_steps_of_the_second_direction_start_at_ln_2():
    """The authors initialize the steps of the first direction only."""
    for symmetric in (False, True):
        mixer = timm.create_model('test_vim', symmetric_init=symmetric).stages[1].mixer
        steps = torch.nn.functional.softplus(torch.stack([mixer.right.scan.dt_bias, mixer.left.scan.dt_bias]))
        assert steps[0].min() >= 1e-4 and steps[0].max() < 0.11
        assert_close(steps[1].mean(), torch.tensor(2.).log()) if not symmetric else (steps[1].max() < 0.11)


def test_states_and_the_sum_of_layers_are_float32_in_a_bfloat16_network():
    torch.manual_seed(0)
    model, x = timm.create_model('test_vim').eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        model.bfloat16()
        assert model.stages[0](x.new_zeros(1, 5, 64, dtype=torch.bfloat16)).dtype == torch.float32
        assert model.stages[0].mixer.left.scan.A_log.dtype == torch.float32
        logits = model(x.bfloat16())
        assert logits.dtype == torch.bfloat16 and relative_error(logits.float(), expected) < 0.03
        assert {y.dtype for y in model.forward_intermediates(x.bfloat16(), intermediates_only=True)} == {torch.bfloat16}


# ---- weight files

_PARTS = {'right.conv': 'conv1d', 'left.conv': 'conv1d_b', 'right.scan.x_proj': 'x_proj',
          'left.scan.x_proj': 'x_proj_b', 'right.scan.dt_proj': 'dt_proj', 'left.scan.dt_proj': 'dt_proj_b'}
_OWN = {'right.scan.A_log': 'A_log', 'left.scan.A_log': 'A_b_log', 'right.scan.D': 'D', 'left.scan.D': 'D_b',
        'right.scan.dt_bias': 'dt_proj.bias', 'left.scan.dt_bias': 'dt_proj_b.bias'}


def _authors_state(model):
    """The state dict as the authors' files have it, written down from their code, not from our key map."""
    state = {}
    for key, value in model.state_dict().items():
        part, _, rest = key.partition('.')
        if part == 'stages':
            layer, _, rest = rest.partition('.')
            inside = rest.removeprefix('mixer.')
            module, _, leaf = inside.rpartition('.')
            name = _OWN.get(inside) or f'{_PARTS.get(module, module)}.{leaf}'
            value = value.squeeze(0) if '.scan.' in key and 'x_proj' not in key else value
            state[f"layers.{layer}.{'mixer.' if rest.startswith('mixer.') else ''}{name}"] = value
        else:
            name = {'stem.proj': 'patch_embed.proj', 'norm': 'norm_f', 'head.fc': 'head', 'stem': ''}[
                key.rpartition('.')[0]]
            state[f"{name}.{key.rpartition('.')[2]}".lstrip('.')] = value
    return state


def _random(name, **options):
    """Build a network with random values for all weights."""
    model = timm.create_model(name, **options)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.normal_()
    return model


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize('name', [*PARAMETERS, 'test_vim'])
def test_every_key_has_one_published_name(name):
    with torch.device('meta'):
        model = timm.create_model(name)
    theirs = _authors_state(model)
    assert len(theirs) == (415 if name != 'test_vim' else 75)
    shapes = {key: value.shape for key, value in model.published_state(model.state_dict()).items()}
    assert shapes == {key: value.shape for key, value in theirs.items()}
    back = model.translate_checkpoint(theirs)
    assert {key: value.shape for key, value in back.items()} == {
        key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize('name', GOLDEN)
def test_golden_names_come_back(name):
    golden, config = _golden(name)
    theirs = _part(golden, 'state/')
    model = _network(golden, config)
    assert _same(model.published_state(model.state_dict()), theirs)


@pytest.mark.parametrize('wrap', [
    lambda state: state,
    lambda state: {'model': state, 'epoch': 299, 'args': argparse.Namespace(lr=1e-3), 'lr_scheduler': {'t': 1},
                   'optimizer': {'state': {}, 'param_groups': [{'lr': 1e-3}]}, 'scaler': {}},
    lambda state: {'state_dict': {f'backbone.{key}': value for key, value in state.items()}},
    lambda state: {'model': {f'module.{key}': value for key, value in state.items()}}],
    ids=['bare', 'model', 'state_dict', 'module'])
def test_published_files_load_strictly(wrap, tmp_path):
    model = _random('test_vim', num_classes=5)
    state = _authors_state(model)
    torch.save(wrap(state), tmp_path / 'best.pth')
    loaded = timm.create_model('test_vim', num_classes=5)
    load_weights(loaded, tmp_path / 'best.pth')
    assert _same(loaded.state_dict(), model.state_dict())
    state.pop('layers.1.mixer.A_b_log')
    torch.save(wrap(state), tmp_path / 'less.pth')
    with pytest.raises(WeightsError, match='1 keys missing .stages.1.mixer.left.scan.A_log'):
        load_weights(loaded, tmp_path / 'less.pth')


def test_the_raw_weights_are_read_and_named(tmp_path):
    """The authors keep the checkpoint in which the raw weights were best."""
    models = {kind: _random('test_vim') for kind in ('raw', 'averaged')}
    torch.save({'model': _authors_state(models['raw']), 'model_ema': _authors_state(models['averaged'])},
               tmp_path / 'best.pth')
    loaded = timm.create_model('test_vim')
    for options, read in (({}, 'raw'), (dict(weights='averaged'), 'averaged')):
        with pytest.warns(UserWarning, match=f'its {read} weights .* are read'):
            load_weights(loaded, tmp_path / 'best.pth', **options)
        assert _same(loaded.state_dict(), models[read].state_dict())


def test_files_of_other_networks_are_refused_in_a_sentence():
    vim, ppma = timm.create_model('test_vim', img_size=224), timm.create_model('test_ppma')
    state = _authors_state(vim)
    with pytest.raises(WeightsError, match=r'rotary embeddings \(rope.freqs_cos.*published networks do not have'):
        vim.load_state_dict({**state, 'rope.freqs_cos': torch.zeros(3), 'rope.freqs_sin': torch.zeros(3)})
    for stride, side, other in ((8, 14, 'vim_tiny or'), (16, 27, 'vim_tiny_stride8 or')):
        model = timm.create_model('test_vim', img_size=224, stride=stride)
        state['pos_embed'] = torch.zeros(1, side * side + 1, 64)
        with pytest.raises(WeightsError, match=f'those of {side} x {side} patches.* this one has stride {stride}: '
                                               f'build {other}'):
            model.load_state_dict(state)
    wider = _authors_state(timm.create_model('test_vim', dim=80))
    with pytest.raises(WeightsError, match='not a checkpoint of this test_vim: .* shapes differ .*80'):
        load_state_dict(vim, wider, 'file.pth')
    with pytest.raises(WeightsError, match='not a checkpoint of this test_vim: .* keys missing'):
        load_state_dict(vim, ppma.state_dict(), 'file.pth')


@pytest.mark.parametrize('published', [True, False])
def test_position_embeddings_of_a_file_are_resized_with_a_warning(published, tmp_path):
    model = _random('test_vim', img_size=96)
    state = _authors_state(model) if published else model.state_dict()
    torch.save(state, tmp_path / 'best.pth')
    larger = timm.create_model('test_vim', img_size=(64, 128))
    with pytest.warns(UserWarning, match='the position embeddings of 6 x 6 patches are resized to 4 x 8'):
        load_weights(larger, tmp_path / 'best.pth')
    x = torch.randn(1, 3, 64, 128)
    with torch.no_grad():
        assert_close(larger.eval()(x), model.eval()(x))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        load_weights(timm.create_model('test_vim', img_size=96), tmp_path / 'best.pth')


def test_published_files_are_listed_and_convert_both_ways(tmp_path):
    from subquad.backbones.weights.convert import convert
    from subquad.backbones.weights.registry import find, of_arch
    found = find('vim_small_stride8')
    assert found.name == 'vim_small_stride8.in1k' and found.reported == {'top1': 81.6, 'top5': 95.4}
    assert found.source == 'hf-hub:hustvl/Vim-small-midclstok@main/vim_s_midclstok_ft_81p6acc.pth'
    assert all(len(of_arch(name)) == 1 and 'code: apache-2.0' in of_arch(name)[0].license for name in PARAMETERS)
    assert timm.get_pretrained_cfg('vim_tiny').hf_hub_filename == 'vim_t_midclstok_76p1acc.pth'
    model, average = _random('test_vim', num_classes=5), _random('test_vim', num_classes=5)
    state = _authors_state(model)
    torch.save({'model': state, 'model_ema': _authors_state(average)}, tmp_path / 'best.pth')
    done = convert(tmp_path / 'best.pth', tmp_path / 'ours.safetensors', model)
    assert done.metadata['provenance']['format'] == 'vim' and done.metadata['provenance']['weights'] == 'raw'
    assert any('its raw weights' in note for note in done.notes)
    convert(tmp_path / 'ours.safetensors', tmp_path / 'theirs.pth', model, to='vim')
    assert _same(torch.load(tmp_path / 'theirs.pth', weights_only=True)['model'], state)
