"""MobileViTv2: the networks of timm and of the authors, their counts and key names; what timm lacks."""
import pytest
import timm
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.backbones.mixers import SeparableSelfAttention
from subquad.backbones.weights import WeightsError, checkpoint_filter_fn, load_weights, save_weights
from subquad.tools.stats import count

# Width: parameters, of them in the classifier, with one for ImageNet-21k; GMACs at 256 and 384, without and with norms.
NETWORKS = {'050': (1_370_593, 257_000, 3_799_243, 0.4646, 0.4805, 1.0450, 1.0807),
            '075': (2_866_009, 385_000, 6_504_259, 1.0280, 1.0518, 2.3125, 2.3661),
            '100': (4_901_841, 513_000, 9_749_691, 1.8121, 1.8438, 4.0766, 4.1480),
            '125': (7_478_089, 641_000, 13_535_539, 2.8169, 2.8566, 6.3373, 6.4266),
            '150': (10_594_753, 769_000, 17_861_803, 4.0425, 4.0901, 9.0946, 9.2018),
            '175': (14_251_833, 897_000, 22_728_483, 5.4888, 5.5443, 12.3486, 12.4736),
            '200': (18_449_329, 1_025_000, 28_135_579, 7.1558, 7.2193, 16.0992, 16.2421)}
SIZES = [(256, 256), (224, 224), (200, 312), (192, 250)]


def _parameters(name, **options):
    return sum(p.numel() for p in timm.create_model(name, device='meta', **options).parameters())


@pytest.mark.parametrize('width', NETWORKS)
def test_parameters_and_macs(width):
    name, (whole, classifier, large, *macs) = f'subquad_mobilevitv2_{width}', NETWORKS[width]
    assert _parameters(name) == whole and _parameters(name, num_classes=0) == whole - classifier
    assert _parameters(name, num_classes=10450) == large
    for size, weights, with_norms in ((256, *macs[:2]), (384, *macs[2:])):
        row = count(name, size, size)
        assert row['macs_of_weights'] / 1e9 == pytest.approx(weights, rel=0.001)
        assert row['macs_with_norms'] / 1e9 == pytest.approx(with_norms, rel=0.001)


def test_counts_agree_with_timms_model():
    ours, theirs = count('subquad_mobilevitv2_050', 200, 312), count('mobilevitv2_050', 200, 312)
    assert all(ours[key] == theirs[key] for key in ('parameters', 'macs_of_weights', 'macs_with_norms'))


def _randomised(name, **options):
    """A model of timm with random norms, statistics and biases, in eval mode."""
    model, g = timm.create_model(name, **options).eval(), torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
            module.weight.data = torch.rand(module.weight.shape, generator=g) + 0.5
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(module.running_mean.shape, generator=g) * 0.3
            module.running_var = torch.rand(module.running_var.shape, generator=g) + 0.5
        if getattr(module, 'bias', None) is not None:
            module.bias.data = torch.randn(module.bias.shape, generator=g) * 0.3
    return model


def _pair(width, **options):
    """timm's model and ours with its weights: its state dict loads as it is."""
    theirs = _randomised(f'mobilevitv2_{width}', **options)
    ours = timm.create_model(f'subquad_mobilevitv2_{width}', **options).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def _close(actual, expected, tolerance=1e-5):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize('options', [{}, dict(output_stride=8), dict(output_stride=16)], ids=str)
@pytest.mark.parametrize('width', ['050', '100', '200'])
def test_equal_to_timms_network(width, options):
    theirs, ours = _pair(width, **options)
    for size in SIZES:
        x = torch.rand(1, 3, *size)
        with torch.no_grad():
            (last, levels), (their_last, their_levels) = (m.forward_intermediates(x) for m in (ours, theirs))
            _close(ours.forward_head(last), theirs.forward_head(their_last))
            for level, their_level in zip(levels, their_levels, strict=True):
                _close(level, their_level)


@pytest.mark.parametrize('options', [{}, dict(output_stride=8), dict(output_stride=16)], ids=str)
def test_features_only_equals_timms(options):
    theirs = _randomised('mobilevitv2_050', features_only=True, **options)
    ours = timm.create_model('subquad_mobilevitv2_050', features_only=True, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    assert ours.feature_info.reduction() == theirs.feature_info.reduction()
    assert ours.feature_info.channels() == theirs.feature_info.channels()
    x = torch.rand(2, 3, 192, 250)
    for level, their_level in zip(ours(x), theirs(x), strict=True):
        _close(level, their_level)


@pytest.mark.parametrize('width, dtype', [('050', torch.float32), ('050', torch.float64), ('100', torch.float64)])
def test_gradients_equal_timms(width, dtype):
    gradients = []
    for model in _pair(width):
        x = torch.rand(2, 3, 96, 122, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        y = model.to(dtype)(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view(y.shape)).sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    if dtype == torch.float64:
        for theirs, ours in zip(*gradients, strict=True):
            assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()
    else:         # all together: gradients that cancel, such as those of a query's bias, are rounding errors in both
        theirs, ours = (torch.cat([g.flatten() for g in both]) for both in gradients)
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_training_mode_equals_timms():
    theirs, ours = (model.train() for model in _pair('050'))
    x = torch.rand(3, 3, 96, 128)
    _close(ours(x), theirs(x))
    for name, value in theirs.named_buffers():
        _close(dict(ours.named_buffers())[name].double(), value.double())


def test_batches_in_parts_equal_single_images():
    model = _pair('050')[1]
    x = torch.rand(9, 3, 96, 128)
    with torch.no_grad():
        _close(model(x), torch.cat([model(image[None]) for image in x]))


# --- files

def test_tags_say_where_timms_weights_are():
    for width in NETWORKS:
        tags = ['cvnets_in1k'] + ['cvnets_in22k_ft_in1k', 'cvnets_in22k_ft_in1k_384'] * (width >= '150')
        assert timm.list_pretrained(f'subquad_mobilevitv2_{width}') == sorted(
            f'subquad_mobilevitv2_{width}.{tag}' for tag in tags)
        for tag in tags:
            ours, theirs = (timm.get_pretrained_cfg(f'{prefix}mobilevitv2_{width}.{tag}').to_dict()
                            for prefix in ('subquad_', ''))
            assert ours['hf_hub_id'] == theirs['hf_hub_id'] == f'timm/mobilevitv2_{width}.{tag}'
            keys = ('input_size', 'pool_size', 'crop_pct', 'mean', 'std', 'interpolation', 'num_classes', 'first_conv',
                    'classifier', 'license', 'fixed_input_size')
            assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
        assert timm.get_pretrained_cfg(f'subquad_mobilevitv2_{width}').tag == 'cvnets_in1k'


def _authors_key(key):
    """The name of one of our entries in the authors' files, from the specification of both networks."""
    words = key.split('.')
    convolution = {'conv': 'conv', 'bn': 'norm'}
    if words[0] == 'head':
        return f'classifier.1.{words[-1]}'
    if words[0] == 'stem':
        return '.'.join(['conv_1.block', convolution[words[1]], words[2]])
    stage, block, name = int(words[1]), words[2], words[3]
    start = f'layer_{stage + 1}.{block}'
    if name in ('conv1_1x1', 'conv2_kxk', 'conv3_1x1'):
        part = {'conv1_1x1': 'exp_1x1', 'conv2_kxk': 'conv_3x3', 'conv3_1x1': 'red_1x1'}[name]
        return f'{start}.block.{part}.block.{convolution[words[4]]}.{words[5]}'
    if name in ('conv_kxk', 'conv_proj'):
        part = {'conv_kxk': 'local_rep.0', 'conv_proj': 'conv_proj'}[name]
        return f'{start}.{part}.block.{convolution[words[4]]}.{words[5]}'
    if name == 'conv_1x1':
        return f'{start}.local_rep.1.block.conv.{words[4]}'
    depth = {2: 2, 3: 4, 4: 3}[stage]
    if name == 'norm':
        return f'{start}.global_rep.{depth}.{words[4]}'
    layer = f'{start}.global_rep.{words[4]}'
    part = {'norm1': 'pre_norm_attn.0', 'norm2': 'pre_norm_ffn.0',
            'attn.qkv_proj': 'pre_norm_attn.1.qkv_proj.block.conv',
            'attn.out_proj': 'pre_norm_attn.1.out_proj.block.conv',
            'mlp.fc1': 'pre_norm_ffn.1.block.conv', 'mlp.fc2': 'pre_norm_ffn.3.block.conv'}['.'.join(words[5:-1])]
    return f'{layer}.{part}.{words[-1]}'


def test_the_authors_classifier_file(tmp_path):
    model = _pair('050')[1]
    state = {_authors_key(key): value for key, value in model.state_dict().items()}
    assert len(state) == 269 and 'layer_4.1.global_rep.4.weight' in state
    assert list(checkpoint_filter_fn(state, model)) == list(model.state_dict())
    torch.save(state, tmp_path / 'mobilevitv2-0.5.pt')
    loaded = timm.create_model('subquad_mobilevitv2_050').eval()
    load_weights(loaded, tmp_path / 'mobilevitv2-0.5.pt')
    x = torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize('heads', [['extra_layers.os_64.dw_conv.block.conv.weight',
                                    'ssd_heads.0.proj_layer.block.conv.weight'],
                                   ['seg_head.aux_head.0.block.conv.weight', 'seg_head.classifier.block.conv.bias'],
                                   ['seg_head.psp_layer.fusion.0.block.conv.weight']], ids=['ssd', 'deeplab', 'psp'])
def test_the_encoder_of_the_authors_detectors_and_segmenters(heads, tmp_path):
    model = timm.create_model('test_mobilevitv2', num_classes=0)
    state = {f'encoder.{_authors_key(key)}': value for key, value in model.state_dict().items()}
    torch.save({**state, **dict.fromkeys(heads, torch.zeros(2))}, tmp_path / 'file.pt')
    loaded = timm.create_model('test_mobilevitv2', num_classes=0)
    load_weights(loaded, tmp_path / 'file.pt')
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
    with pytest.raises(WeightsError, match='2 keys missing .head.fc.weight, head.fc.bias'):
        load_weights(timm.create_model('test_mobilevitv2'), tmp_path / 'file.pt')


def test_training_checkpoints_of_the_authors_give_their_average(tmp_path):
    model = timm.create_model('test_mobilevitv2')
    state = {_authors_key(key): value for key, value in model.state_dict().items()}
    torch.save({'model_state_dict': {key: value * 0 for key, value in state.items()}, 'ema_state_dict': state,
                'epoch': 3}, tmp_path / 'checkpoint.pt')
    loaded = timm.create_model('test_mobilevitv2')
    assert load_weights(loaded, tmp_path / 'checkpoint.pt') == 'ema_state_dict'
    assert torch.equal(loaded.head.fc.weight, model.head.fc.weight)


def test_another_width_is_refused(tmp_path):
    save_weights(timm.create_model('subquad_mobilevitv2_050'), tmp_path / 'w.safetensors')
    with pytest.raises(WeightsError, match='a checkpoint of this test_mobilevitv2: 228 shapes differ .*instead of'):
        load_weights(timm.create_model('test_mobilevitv2'), tmp_path / 'w.safetensors')


# --- options

@pytest.mark.parametrize('width, channels', [(0.25, [16, 32, 64, 96, 128]), (0.3, [32, 40, 80, 112, 152]),
                                             (1.1, [64, 144, 280, 424, 560]), (2.5, [160, 320, 640, 960, 1280])])
def test_any_width(width, channels):
    """Channels as the authors round them."""
    model = timm.create_model('subquad_mobilevitv2_100', width=width, device='meta')
    assert [level['num_chs'] for level in model.feature_info] == channels
    assert model.stem.conv.out_channels == {0.25: 16, 0.3: 16, 1.1: 32, 2.5: 64}[width]
    assert model(torch.empty(1, 3, 64, 64, device='meta')).shape == (1, 1000)


@pytest.mark.parametrize('options', [dict(num_latent_tokens=3), dict(num_latent_tokens=8, sampling='patch'),
                                     dict(attention='mha'), dict(attention='linformer', img_size=(96, 128)),
                                     dict(exact_size=True)], ids=str)
def test_options_train(options):
    model = timm.create_model('test_mobilevitv2', num_classes=5, drop_path_rate=0.2, **options)
    model(torch.rand(2, 3, 96, 128)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    folded = timm.create_model('test_mobilevitv2', num_classes=5, exportable=True, **options).eval()
    folded.load_state_dict(model.state_dict())
    x = torch.rand(2, 3, 96, 128)
    _close(folded(x), model(x))


def test_latent_tokens_cost_a_row_each():
    """A row of d weights and a bias for each of the 9 layers; equal rows give the network with one."""
    assert _parameters('test_mobilevitv2', num_latent_tokens=3) - _parameters('test_mobilevitv2') \
        == 2 * sum(depth * (dim + 1) for depth, dim in ((2, 32), (4, 48), (3, 64)))
    one, three = (timm.create_model('test_mobilevitv2', num_latent_tokens=n).eval() for n in (1, 3))
    state = {key: torch.cat([value[:1], value[:1], value]) if '.qkv_proj.' in key else value
             for key, value in one.state_dict().items()}
    three.load_state_dict(state)
    x = torch.rand(1, 3, 64, 96)
    _close(three(x), one(x))


def test_exact_size():
    """Maps with odd sides stay as they are; where all are even, nothing changes."""
    exact, default = (timm.create_model('test_mobilevitv2', exact_size=on).eval() for on in (True, False))
    exact.load_state_dict(default.state_dict())
    x = torch.rand(1, 3, 256, 128)
    torch.testing.assert_close(exact(x), default(x))
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
    """Scores and keys from the source, values from the input, on grids of their own size; timm's raises."""
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
    torch.testing.assert_close(unit(x, source), unit.out_proj(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unit(x, x), unit(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError):
        theirs = timm.create_model('mobilevitv2_050').stages[2][1].transformer[0].attn
        theirs(torch.randn(1, 64, 4, 4), torch.randn(1, 64, 4, 4))


@pytest.mark.parametrize('options', [{}, dict(attention='mha')], ids=str)
def test_cross_attention_between_frames(options):
    """A block takes its context from the tokens of another frame, of another size too."""
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
                torch.testing.assert_close(scores[:, :, i::2, j::2].sum((2, 3)), torch.ones(3, latents))
    one = model.context_scores(x[1:2])
    torch.testing.assert_close(one['stages.3.1.transformer.2'][0], maps['stages.3.1.transformer.2'][1])
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_context_scores_leave_the_model_as_it_was():
    """Whether it trains, was made for export, or refuses the image."""
    plain = timm.create_model('test_mobilevitv2')
    model = timm.create_model('test_mobilevitv2', exportable=True).train()
    model.load_state_dict(plain.state_dict())
    model.stem.eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.rand(2, 3, 64, 96)
    for found, expected in zip(model.context_scores(x).values(), plain.eval().context_scores(x).values(), strict=True):
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError):
        model.context_scores(x[0])
    assert model.training and model.stages.training and not model.stem.training and model.stages[2][1].exportable
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_no_context_scores_without_separable_attention():
    with pytest.raises(ValueError, match="belong to attention='separable'"):
        timm.create_model('test_mobilevitv2', attention='mha').context_scores(torch.rand(1, 3, 64, 64))


# --- graphs

class _Watch(TorchDispatchMode):
    """The operations that run, with the largest rank of what they give."""

    def __init__(self):
        super().__init__()
        self.ranks = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.ranks[str(function)] = max(x.ndim, self.ranks.get(str(function), 0))
        return out


@pytest.mark.parametrize('options', [{}, dict(exportable=True), dict(exact_size=True), dict(sampling='patch'),
                                     dict(attention='mha')], ids=str)
def test_no_tensor_above_rank_4_and_no_im2col(options):
    model = timm.create_model('test_mobilevitv2', **options)
    for training in (True, False):
        with _Watch() as watch:
            model.train(training)(torch.rand(2, 3, 72, 104))
        assert max(watch.ranks.values()) == 4 and not [name for name in watch.ranks if 'im2col' in name]


def test_a_trace_at_256_is_right_at_320_and_refuses_224():
    model = timm.create_model('test_mobilevitv2').eval()
    traced = torch.jit.trace(model, torch.rand(1, 3, 256, 256))
    x = torch.rand(2, 3, 320, 320)
    _close(traced(x), model(x))
    with pytest.raises(RuntimeError):               # its maps are odd, and the trace has no resizing
        traced(torch.rand(1, 3, 224, 224))


@pytest.mark.parametrize('dims', [pytest.param('bh', id='batch and height'),
                                  pytest.param('bhw', id='batch, height and width', marks=pytest.mark.slow)])
def test_dynamic_export(dims):
    model, Dim = timm.create_model('test_mobilevitv2').eval(), torch.export.Dim
    sizes = {'b': Dim('batch', max=64), 'h': Dim('height', min=2, max=16) * 64, 'w': Dim('width', min=2, max=16) * 64}
    program = torch.export.export(model, (torch.rand(2, 3, 256, 256),),
                                  dynamic_shapes=({'bchw'.index(d): sizes[d] for d in dims},))
    x = torch.rand(3, 3, 320, 192 if 'w' in dims else 256)
    _close(program.module()(x), model(x))


@pytest.mark.parametrize('options', [{}, dict(num_latent_tokens=2)], ids=str)
def test_autocast(options):
    model = timm.create_model('test_mobilevitv2', **options).eval()
    x = torch.rand(2, 3, 64, 96)
    with torch.autocast('cpu', torch.bfloat16):
        y = model(x)
        y.float().sum().backward()
    assert (y.float() - model(x)).abs().max() <= 0.1 * model(x).abs().max()


def test_on_the_kernels():
    """The network on the Triton kernels (in the interpreter without a GPU), with gradients."""
    pytest.importorskip('triton')
    from subquad import kernels
    from subquad.kernels import launch
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cpu' and not launch.interpreted():
        pytest.skip('no GPU, and Triton was imported without TRITON_INTERPRET=1')
    results = []
    for backend in ('reference', 'triton'):
        torch.manual_seed(0)
        model = timm.create_model('test_mobilevitv2', num_latent_tokens=2).to(device).eval()
        x = torch.rand(1, 3, 64, 32, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        with kernels.use_backend(backend):
            y = model(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() <= 2e-5 * expected.norm().clamp(min=1e-3)


# --- errors

@pytest.mark.parametrize('options, message', [
    (dict(width=0.2), 'width must be a number from 0.25 to 2.5, got 0.2'),
    (dict(width='wide'), 'width must be a number'),
    (dict(num_latent_tokens=0), 'num_latent_tokens must be an integer from 1 to 64, got 0'),
    (dict(num_latent_tokens=1.5), 'num_latent_tokens must be an integer'),
    (dict(num_latent_tokens=65), 'num_latent_tokens must be an integer from 1 to 64, got 65'),
    (dict(attention='softmax'), "attention must be one of 'separable', 'mha', 'linformer', got 'softmax'"),
    (dict(sampling='token'), "sampling must be one of 'pixel', 'patch', got 'token'"),
    (dict(output_stride=4), 'output_stride must be one of 8, 16, 32, got 4'),
    (dict(attention='mha', num_latent_tokens=2), "num_latent_tokens go with attention='separable', got 'mha'"),
    (dict(attention='mha', exact_size=True), "exact_size and num_latent_tokens go with attention='separable'"),
    (dict(num_classes=-1), 'num_classes must be an integer of at least 0'),
    (dict(drop_path_rate=1.0), 'drop_path_rate must be a number from 0 to below 1'),
    (dict(img_size=16), 'img_size must be integers of at least 32')])
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('test_mobilevitv2', **options)


def test_wrong_inputs():
    model = timm.create_model('test_mobilevitv2')
    for x, error, message in ((torch.rand(2, 196, 64), ValueError, r'must be \(B, 3, H, W\).*got \(2, 196, 64\)'),
                              (torch.rand(2, 3, 16, 64), ValueError, 'H and W >= 32'),
                              (torch.rand(2, 1, 64, 64), ValueError, r'\(B, 3, H, W\)'),
                              (torch.zeros(2, 3, 64, 64, dtype=torch.uint8), TypeError, 'floating-point')):
        with pytest.raises(error, match=message):
            model(x)
    linformer = timm.create_model('test_mobilevitv2', attention='linformer', img_size=64)
    with pytest.raises(ValueError, match='made for 16 tokens a group, and this input has 24: make the model with img'):
        linformer(torch.rand(1, 3, 64, 96))
