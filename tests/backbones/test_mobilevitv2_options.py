"""Test the options, context scores, graphs and errors of MobileViTv2."""
import pytest
import timm
import torch
from helpers import assert_close
from operator_cases import DEVICE, skip_without_triton
from torch import nn

from subquad.backbones.mixers import SeparableSelfAttention
from subquad.kernels import use_backend


def _parameters(name, **options):
    return sum(p.numel() for p in timm.create_model(name, device='meta', **options).parameters())


@pytest.mark.parametrize('width, channels', [(0.25, [16, 32, 64, 96, 128]), (0.3, [32, 40, 80, 112, 152]),
                                             (1.1, [64, 144, 280, 424, 560]), (2.5, [160, 320, 640, 960, 1280])])
def test_channels_of_any_width(width, channels):
    """The authors' code rounds the channels in the same way."""
    model = timm.create_model('subquad_mobilevitv2_100', width=width, device='meta')
    assert [level['num_chs'] for level in model.feature_info] == channels
    assert model.stem.conv.out_channels == {0.25: 16, 0.3: 16, 1.1: 32, 2.5: 64}[width]
    assert model(torch.empty(1, 3, 64, 64, device='meta')).shape == (1, 1000)


@pytest.mark.parametrize('options', [dict(num_latent_tokens=3), dict(num_latent_tokens=8, sampling='patch'),
                                     dict(attention='mha'), dict(attention='linformer', img_size=(96, 128)),
                                     dict(exact_size=True)], ids=str)
def test_networks_with_options_train_and_have_an_export_form(options):
    model = timm.create_model('test_mobilevitv2', num_classes=5, drop_path_rate=0.2, **options)
    model(torch.rand(2, 3, 96, 128)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    x = torch.rand(2, 3, 96, 128)
    expected = model(x)
    with use_backend('export'):
        assert_close(model(x), expected)


def test_each_latent_token_adds_a_row():
    """Each of the 9 layers gets a row of d weights and a bias. Equal rows give the network with one latent token."""
    assert _parameters('test_mobilevitv2', num_latent_tokens=3) - _parameters('test_mobilevitv2') \
        == 2 * sum(depth * (dim + 1) for depth, dim in ((2, 32), (4, 48), (3, 64)))
    one, three = (timm.create_model('test_mobilevitv2', num_latent_tokens=n).eval() for n in (1, 3))
    state = {key: torch.cat([value[:1], value[:1], value]) if '.qkv_proj.' in key else value
             for key, value in one.state_dict().items()}
    three.load_state_dict(state)
    x = torch.rand(1, 3, 64, 96)
    assert_close(three(x), one(x))


def test_exact_size_keeps_odd_maps():
    """`exact_size` keeps maps with odd sides. It has no effect if all sides are even."""
    exact, default = (timm.create_model('test_mobilevitv2', exact_size=on).eval() for on in (True, False))
    exact.load_state_dict(default.state_dict())
    x = torch.rand(1, 3, 256, 128)
    assert_close(exact(x), default(x))
    x = torch.rand(1, 3, 224, 200)
    sizes = [[tuple(f.shape[2:]) for f in model.forward_intermediates(x, intermediates_only=True)]
             for model in (exact, default)]
    assert sizes[0] == [(112, 100), (56, 50), (28, 25), (14, 13), (7, 7)]
    assert sizes[1] == [(112, 100), (56, 50), (28, 26), (14, 14), (8, 8)]


def test_a_dilated_network_keeps_its_map():
    model = timm.create_model('test_mobilevitv2', output_stride=8, features_only=True)
    assert model.feature_info.reduction() == [2, 4, 8, 8, 8]
    assert [f.shape[2:] for f in model(torch.rand(1, 3, 128, 64))][2:] == [(16, 8)] * 3


def test_drop_path_acts_on_residual_branches():
    from timm.layers import DropPath
    model = timm.create_model('test_mobilevitv2', drop_path_rate=0.1)
    rates = [m.drop_prob for m in model.modules() if isinstance(m, DropPath)]
    assert len(rates) == 1 + 2 * (2 + 4 + 3) and rates == sorted(rates) and rates[-1] == pytest.approx(0.1)


def test_cross_attention():
    """Scores and keys come from the source, values from the input, on grids of different size. timm's raises."""
    unit = SeparableSelfAttention(6)
    x, source = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 6, 2)
    query, key = (nn.functional.conv2d(source, unit.qkv_proj.weight[a:b], unit.qkv_proj.bias[a:b])
                  for a, b in ((0, 1), (1, 7)))
    value = nn.functional.conv2d(x, unit.qkv_proj.weight[7:], unit.qkv_proj.bias[7:])
    expected = torch.empty_like(value)
    for i in (0, 1):
        for j in (0, 1):
            scores = query[:, :, i::2, j::2].flatten(2).softmax(-1)
            context = (key[:, :, i::2, j::2].flatten(2) * scores).sum(-1)[..., None, None]
            expected[:, :, i::2, j::2] = value[:, :, i::2, j::2].relu() * context
    assert_close(unit(x, source), unit.out_proj(expected))
    assert_close(unit(x, x), unit(x))
    with pytest.raises(RuntimeError):
        theirs = timm.create_model('mobilevitv2_050').stages[2][1].transformer[0].attn
        theirs(torch.randn(1, 64, 4, 4), torch.randn(1, 64, 4, 4))


@pytest.mark.parametrize('options', [{}, dict(attention='mha')], ids=str)
def test_cross_attention_between_frames(options):
    """A block takes its context from the tokens of another frame, whose size may differ."""
    block = timm.create_model('test_mobilevitv2', **options).eval().stages[2][1]
    frame, previous = torch.randn(1, 64, 8, 12), torch.randn(1, 64, 8, 16)
    tokens = block.forward_tokens(previous)
    assert tokens.shape == (1, 32, 8, 16)
    y = block(frame, tokens)
    assert y.shape == frame.shape and not torch.allclose(y, block(frame))


# --- context scores

@pytest.mark.parametrize('size', [(96, 128), (64, 64)])
@pytest.mark.parametrize('latents', [1, 2])
def test_context_scores(size, latents):
    model = timm.create_model('test_mobilevitv2', num_latent_tokens=latents).eval()
    x = torch.rand(3, 3, *size)
    maps = model.context_scores(x)
    assert list(maps) == [f'stages.{stage}.1.transformer.{n}' for stage, depth in ((2, 2), (3, 4), (4, 3))
                          for n in range(depth)]
    for name, scores in maps.items():
        stride = 2 ** (int(name[7]) + 1)
        height, width = (-(-n // stride) + -(-n // stride) % 2 for n in size)
        assert scores.shape == (3, latents, height, width)
        for i in (0, 1):
            for j in (0, 1):
                assert_close(scores[:, :, i::2, j::2].sum((2, 3)), torch.ones(3, latents))
    one = model.context_scores(x[1:2])
    assert_close(one['stages.3.1.transformer.2'][0], maps['stages.3.1.transformer.2'][1])
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_context_scores_leave_the_model_as_it_was():
    """Its mode and its weights stay the same, also after an error."""
    model = timm.create_model('test_mobilevitv2').train()
    model.stem.eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.rand(2, 3, 64, 96)
    model.context_scores(x)
    with pytest.raises(ValueError):
        model.context_scores(x[0])
    assert model.training and model.stages.training and not model.stem.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_no_context_scores_without_separable_attention():
    with pytest.raises(ValueError, match="require attention='separable'"):
        timm.create_model('test_mobilevitv2', attention='mha').context_scores(torch.rand(1, 3, 64, 64))


# --- graphs


def test_a_trace_at_256_works_at_320_and_raises_at_224():
    model = timm.create_model('test_mobilevitv2').eval()
    traced = torch.jit.trace(model, torch.rand(1, 3, 256, 256))
    x = torch.rand(2, 3, 320, 320)
    assert_close(traced(x), model(x))
    with pytest.raises(RuntimeError):               # its maps have odd sides, which the trace does not resize
        traced(torch.rand(1, 3, 224, 224))


def test_a_block_exports_with_dynamic_sizes():
    block, Dim = timm.create_model('test_mobilevitv2').eval().stages[2][1], torch.export.Dim
    sizes = {0: Dim('batch', max=64), 2: Dim('height', min=2, max=64) * 2, 3: Dim('width', min=2, max=64) * 2}
    channels = block.conv_kxk.conv.in_channels
    program = torch.export.export(block, (torch.rand(2, channels, 16, 12),), dynamic_shapes=(sizes,))
    x = torch.rand(3, channels, 10, 18)
    assert_close(program.module()(x), block(x))


@pytest.mark.slow
@pytest.mark.parametrize('dims', ['bh', 'bhw'])
def test_dynamic_export(dims):
    model, Dim = timm.create_model('test_mobilevitv2').eval(), torch.export.Dim
    sizes = {'b': Dim('batch', max=64), 'h': Dim('height', min=2, max=16) * 64, 'w': Dim('width', min=2, max=16) * 64}
    program = torch.export.export(model, (torch.rand(2, 3, 256, 256),),
                                  dynamic_shapes=({'bchw'.index(d): sizes[d] for d in dims},))
    x = torch.rand(3, 3, 320, 192 if 'w' in dims else 256)
    assert_close(program.module()(x), model(x))


@pytest.mark.parametrize('options', [{}, dict(num_latent_tokens=2)], ids=str)
def test_autocast_stays_close_to_float32(options):
    # The test network is too narrow: with random weights it amplifies rounding up to five times as much.
    model = timm.create_model('subquad_mobilevitv2_050', **options).eval()
    x = torch.rand(2, 3, 64, 96)
    with torch.autocast('cpu', torch.bfloat16):
        y = model(x)
        y.float().sum().backward()
    assert_close(y.float(), model(x), 0.1)


def test_triton_equals_the_reference():
    """Compare outputs and gradients on the Triton kernels, which run in the interpreter if there is no GPU."""
    skip_without_triton()
    results = []
    for backend in ('reference', 'triton'):
        torch.manual_seed(0)
        model = timm.create_model('test_mobilevitv2', num_latent_tokens=2).to(DEVICE).eval()
        x = torch.rand(1, 3, 64, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
        with use_backend(backend):
            y = model(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() <= 2e-5 * expected.norm().clamp(min=1e-3)


# --- errors

def test_latent_tokens_without_effect_get_a_warning():
    with pytest.warns(UserWarning, match="num_latent_tokens=2 has no effect with attention='mha'"):
        timm.create_model('test_mobilevitv2', attention='mha', num_latent_tokens=2)


def test_norms_in_training_mode_see_the_whole_batch():
    """This happens when a model in evaluation mode adapts its statistics to new images."""
    model = timm.create_model('test_mobilevitv2').eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.rand(9, 3, 64, 64)
    with torch.no_grad():
        y = model(x)
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, expected[key])]
    assert len(changed) == 3 * 25
    model.load_state_dict(expected)
    assert_close(y, model.train()(x))


def test_autocast_keeps_double_precision():
    model = timm.create_model('test_mobilevitv2').double().eval()
    with torch.autocast('cpu', torch.bfloat16):
        assert model(torch.rand(1, 3, 64, 64, dtype=torch.float64)).dtype == torch.float64


def test_an_odd_source_in_the_export_form():
    block = timm.create_model('test_mobilevitv2', exact_size=True).eval().stages[2][1]
    x, source = torch.randn(1, 64, 4, 6), torch.randn(1, 32, 5, 6)
    expected = block(x, source)
    with use_backend('export'):
        assert_close(block(x, source), expected)


def test_exact_size_traces_at_odd_sizes():
    model, x = timm.create_model('test_mobilevitv2', exact_size=True).eval(), torch.rand(1, 3, 224, 224)
    assert_close(torch.jit.trace(model, x)(x), model(x))


def test_hooks_pruning_and_adapters_take_effect():
    """The shortcuts that bypass the call of a module must not bypass these."""
    from torch.nn.utils import prune
    model, x, seen = timm.create_model('test_mobilevitv2').eval(), torch.rand(1, 3, 64, 64), []
    expected = model(x)
    unit, convolution = model.stages[2][1].transformer[0].attn, model.stages[1][0].conv1_1x1.conv
    handle = convolution.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert_close(model(x), expected)
    assert len(seen) == 1
    handle.remove()
    prune.l1_unstructured(unit.qkv_proj, 'weight', amount=0.5)
    for _ in range(2):
        model.train()(x.repeat(2, 1, 1, 1)).sum().backward()
    assert not torch.equal(model.eval()(x), expected)

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.weight, self.bias = base, base.weight, base.bias

        def forward(self, x):
            return self.base(x) + 1

    model = timm.create_model('test_mobilevitv2').eval()
    expected = model(x)
    model.stages[2][1].transformer[0].attn.qkv_proj = Adapter(model.stages[2][1].transformer[0].attn.qkv_proj)
    assert not torch.allclose(model(x), expected)
