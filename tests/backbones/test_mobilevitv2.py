"""Test MobileViTv2 against timm's and the authors' networks: outputs, counts and key names."""
import pytest
import timm
import torch
from helpers import assert_close
from pairwise import pairwise, slow
from torch import nn

from subquad.backbones.weights import WeightsError, load_weights
from subquad.backbones.weights.mobilevitv2_keys import to_cvnets_keys
from subquad.tools.engine.counting.counts import count

# By width: parameters, parameters of the classifier, parameters with a classifier for ImageNet-21k; GMACs without and
# with norms at 256, and at 384.
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


@pytest.mark.parametrize('width', ['050', '100', '200', *slow('075', '125', '150', '175')])
def test_mobilevitv2_parameters_and_macs(width):
    name, (whole, classifier, large, *macs) = f'subquad_mobilevitv2_{width}', NETWORKS[width]
    assert _parameters(name) == whole and _parameters(name, num_classes=0) == whole - classifier
    assert _parameters(name, num_classes=10450) == large
    for size, weights, with_norms in ((256, *macs[:2]), (384, *macs[2:])):
        row = count(name, size, size)
        assert row['macs_without_attention'] / 1e9 == pytest.approx(weights, rel=0.001)
        assert row['macs_with_norms'] / 1e9 == pytest.approx(with_norms, rel=0.001)


def test_counts_agree_with_timms_model():
    ours, theirs = count('subquad_mobilevitv2_050', 200, 312), count('mobilevitv2_050', 200, 312)
    assert all(ours[key] == theirs[key] for key in ('parameters', 'macs_without_attention', 'macs_with_norms'))


def _randomized(name, **options):
    """A model of timm with random norms, statistics and biases, in evaluation mode. It is the same in every call.

    With seed 0 a value is within rounding of the kink of ReLU, whose derivative then is undefined in float32.
    """
    torch.manual_seed(1)
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
    """timm's model, and this package's with its weights: the state dict loads unchanged."""
    theirs = _randomized(f'mobilevitv2_{width}', **options)
    ours = timm.create_model(f'subquad_mobilevitv2_{width}', **options).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pairwise('options, width', [{}, dict(output_stride=8), dict(output_stride=16)], ['050', '100', '200'], together=1)
def test_equal_to_timms_network(width, options):
    theirs, ours = _pair(width, **options)
    for size in SIZES:
        x = torch.rand(1, 3, *size)
        with torch.no_grad():
            (last, levels), (their_last, their_levels) = (m.forward_intermediates(x) for m in (ours, theirs))
            assert_close(ours.forward_head(last), theirs.forward_head(their_last))
            for level, their_level in zip(levels, their_levels, strict=True):
                assert_close(level, their_level)


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
            assert_close(ours, theirs, 1e-9)
    else:         # compare all together: gradients that cancel, such as that of a query's bias, are rounding errors
        theirs, ours = (torch.cat([g.flatten() for g in both]) for both in gradients)
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_training_mode_equals_timms():
    theirs, ours = (model.train() for model in _pair('050'))
    x = torch.rand(3, 3, 96, 128)
    assert_close(ours(x), theirs(x))
    for name, value in theirs.named_buffers():
        assert_close(dict(ours.named_buffers())[name].double(), value.double())


def test_a_batch_equals_single_images():
    model = _pair('050')[1]
    x = torch.rand(9, 3, 96, 128)
    with torch.no_grad():
        assert_close(model(x), torch.cat([model(image[None]) for image in x]))


# --- files

def test_tags_point_to_the_weights_of_timm():
    for width in NETWORKS:
        tags = ['cvnets_in1k'] + ['cvnets_in22k_ft_in1k', 'cvnets_in22k_ft_in1k_384'] * (width >= '150')
        assert {f'subquad_mobilevitv2_{width}.{tag}' for tag in tags} < {
            *timm.list_pretrained(f'subquad_mobilevitv2_{width}')}
        for tag in tags:
            ours, theirs = (timm.get_pretrained_cfg(f'{prefix}mobilevitv2_{width}.{tag}').to_dict()
                            for prefix in ('subquad_', ''))
            assert ours['hf_hub_id'] == theirs['hf_hub_id'] == f'timm/mobilevitv2_{width}.{tag}'
            keys = ('input_size', 'pool_size', 'crop_pct', 'mean', 'std', 'interpolation', 'num_classes', 'first_conv',
                    'classifier', 'license', 'fixed_input_size')
            assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
        assert timm.get_pretrained_cfg(f'subquad_mobilevitv2_{width}').tag == 'cvnets_in1k'


@pytest.mark.parametrize('heads', [['extra_layers.os_64.dw_conv.block.conv.weight',
                                    'ssd_heads.0.proj_layer.block.conv.weight'],
                                   ['seg_head.aux_head.0.block.conv.weight', 'seg_head.classifier.block.conv.bias'],
                                   ['seg_head.psp_layer.fusion.0.block.conv.weight']], ids=['ssd', 'deeplab', 'psp'])
def test_the_encoder_of_a_detector_or_segmenter_of_the_authors_loads(heads, tmp_path):
    model = timm.create_model('test_mobilevitv2', num_classes=0)
    state = {f'encoder.{key}': value for key, value in to_cvnets_keys(model.state_dict()).items()}
    torch.save({**state, **dict.fromkeys(heads, torch.zeros(2))}, tmp_path / 'file.pt')
    loaded = timm.create_model('test_mobilevitv2', num_classes=0)
    load_weights(loaded, tmp_path / 'file.pt')
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
    with pytest.raises(WeightsError, match='2 keys missing .head.fc.weight, head.fc.bias'):
        load_weights(timm.create_model('test_mobilevitv2'), tmp_path / 'file.pt')
