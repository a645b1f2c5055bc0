"""Test Vim against the published network: image sizes, slips and weight files."""
import warnings

import pytest
import timm
import torch
from golden_networks import PublishedNetwork, load_golden, logits_error, randomize
from helpers import assert_close, relative_error

from subquad.backbones.vim import Vim, put_in_middle, resize_pos_embed, take_from_middle
from subquad.backbones.weights import WeightsError, load_state_dict, load_weights
from subquad.backbones.weights.registry import find, of_arch

# Tokens x channels x directions x states of all layers.
ELEMENTS = {'vim_tiny': 58.1e6, 'vim_tiny_stride8': 215e6, 'vim_small': 116e6, 'vim_small_stride8': 431e6,
            'vim_base': 232e6}


def _build(config):
    return Vim(dim=config['embed_dim'], depth=config['depth'], patch_size=config['patch_size'],
               stride=config['stride'], class_token=config['if_cls_token'],
               img_size=config['img_size'], num_classes=config['num_classes'])


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


class TestPublishedNetwork(PublishedNetwork):
    family, gradients, complete = 'vim', 1e-4, {}
    build, authors_state = staticmethod(_build), staticmethod(_authors_state)
    parameters = dict(vim_tiny=7_148_008, vim_tiny_stride8=7_250_344, vim_small=25_796_584,
                      vim_small_stride8=26_001_256, vim_base=97_598_440)
    gmacs = dict(vim_tiny=1.293, vim_tiny_stride8=4.790, vim_small=4.852,
                 vim_small_stride8=17.977, vim_base=18.767)
    keys = {**dict.fromkeys(parameters, 415), 'test_vim': 75}
    missing = {'layers.1.mixer.A_b_log': 'stages.1.mixer.left.scan.A_log'}

    def macs(self, name, row):
        return row['macs'] - 3 * ELEMENTS[name]      # a scan counts three products per element

    def intermediates(self, golden, model, image):
        features, layers = model.forward_intermediates(image, output_fmt='NLC', return_prefix_tokens=True)
        tokens = [put_in_middle(*layer) if model.class_token else layer for layer in layers]
        return [(features, golden['features']), *(
            (x, golden[f'hidden{n}'] + golden[f'residual{n}']) for n, x in enumerate(tokens, 1))]


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
    golden, model = load_golden('vim_stride8_nonsquare', _build)
    for layer in model.stages:
        if wrong == 'swapped':
            layer.mixer.right, layer.mixer.left = layer.mixer.left, layer.mixer.right
            layer.mixer.right.scan.paths, layer.mixer.left.scan.paths = ('right',), ('left',)
            layer.mixer.right.conv.reverse, layer.mixer.left.conv.reverse = False, True
        if wrong == 'causal':                            # the second convolution must see the tokens after its own
            layer.mixer.left.conv.reverse = False
    if wrong == 'first':
        monkeypatch.setattr('subquad.backbones.vim.put_in_middle', lambda x, row: torch.cat([row, x], 1))
    assert logits_error(golden, model) > 0.05


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
    model = randomize(timm.create_model('test_vim', img_size=96))
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


def test_published_files_are_listed():
    found = find('vim_small_stride8')
    assert found.name == 'vim_small_stride8.in1k' and found.reported == {'top1': 81.6, 'top5': 95.4}
    assert found.source == 'hf-hub:hustvl/Vim-small-midclstok@main/vim_s_midclstok_ft_81p6acc.pth'
    for rows in map(of_arch, ELEMENTS):
        assert len(rows) == 1 and 'code: apache-2.0' in rows[0].license
    assert timm.get_pretrained_cfg('vim_tiny').hf_hub_filename == 'vim_t_midclstok_76p1acc.pth'
