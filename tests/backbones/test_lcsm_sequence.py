"""Test the causal model of sequences: every preset and code, causality, options and errors."""

import pytest
import timm
import torch
from helpers import ROOT, assert_close

from subquad.backbones.mixers import EosMixer
from subquad.backbones.mixers.eos_codes import PRESETS, WITHOUT_KEYS

NAMES = [*PRESETS, '0-0-0-0', '0-1-0-0', '1-0-1-0', '1-1-1-4', '1-6-1-2', '1-11-1-0', '1-12-1-5', '0-1-0-1-3']


def network(mixer='gla', **options):
    torch.manual_seed(0)
    keys = {} if mixer in WITHOUT_KEYS else {'expand_dim': 4}
    return timm.create_model('lcsm_sequence', mixer=mixer,
                             **{'num_classes': 20, 'dim': 8, 'num_heads': 2, **keys, **options}).double().eval()


def sequences(*shape):
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('mixer', NAMES)
def test_no_token_depends_on_a_later_one(mixer):
    model, x = network(mixer, conv_size=3), sequences(2, 11)
    whole, other = model(x), x.clone()
    assert whole.shape == (2, 11, 20)
    other[:, 6:] = (other[:, 6:] + 7) % 20
    changed = model(other)
    assert_close(changed[:, :6], whole[:, :6], 1e-9)
    assert ((changed[:, 6:] - whole[:, 6:]).abs().amax(-1) > 1e-9).all()
    if mixer != 'cosformer':                                           # its angle depends on the length
        assert_close(model(x[:, :6]), whole[:, :6], 1e-9)


@pytest.mark.parametrize('mixer', ['gla', 'mamba', 'deltanet', '1-0-1-0', '0-0-0-0', '1-12-1-0'])
def test_both_directions_are_two_passes_that_share_the_token_itself(mixer):
    """The sum of a pass from the start and one from the end counts the token itself twice, 'raster' counts it once."""
    torch.manual_seed(0)
    made = [EosMixer(8, 2, mixer, mode, expand_dim=4, dtype=torch.float64) for mode in ('forward', 'raster')]
    made[1].load_state_dict(made[0].state_dict())
    x = torch.randn(1, 1, 9, 8, dtype=torch.float64)
    there, both = (mix.mix(mix.value(x), x) for mix in made)
    back = made[0].mix(made[0].value(x.flip(2)), x.flip(2)).flip(2)
    alone = torch.cat([made[1].mix(made[1].value(token), token) for token in x.split(1, 2)], 2)
    if mixer != '1-12-1-0':                                            # a mean, whose weights depend on the direction
        assert_close(both, there + back - alone, 1e-9)
    assert_close(there[:, :, :1], alone[:, :, :1], 1e-9)


def test_parameters_are_trained_and_embeddings_are_shared():
    model = network('1-0-1-0', mlp_ratio=1.5, conv_size=2)
    grads = torch.autograd.grad(model(sequences(2, 7)).square().sum(), list(model.parameters()))
    assert all(grad.abs().max() > 0 for grad in grads)
    assert model.get_classifier() is model.embedding and 'head.weight' not in model.state_dict()
    assert {name.rsplit('.', 1)[1] for name in model.no_weight_decay()} == {'decay'}
    model.set_grad_checkpointing()
    assert_close(torch.autograd.grad(model(sequences(2, 7)).square().sum(), model.embedding.weight)[0], grads[0], 1e-9)
    apart = network(tied=False)
    assert apart.head.weight.shape == (20, 8) and apart(sequences(1, 3)).shape == (1, 3, 20)
    features = network(num_classes=0, vocab_size=20)
    assert features(sequences(1, 3)).shape == (1, 3, 8) and not features.tied
    model.reset_classifier(5)
    assert model(sequences(1, 3)).shape == (1, 3, 5)


def test_gates_convolutions_and_feed_forward_layers_are_options():
    names = {name for name, _ in network().named_parameters()}
    assert any('gate' in name for name in names) and any('glu' in name for name in names)
    bare = {name for name, _ in network('1-0-1-0', gated=False, mlp_ratio=0.).named_parameters()}
    assert not any(word in name for name in bare for word in ('gate', 'glu', 'conv', 'norm2'))


@pytest.mark.parametrize('options, message', [
    (dict(mixer='mambo'), "got 'mambo'\npresets:"), (dict(mixer='1-13-1-0'), 'not in the table\npresets:'),
    (dict(mixer='gla', tau=0), 'tau must be positive.*\npresets:'), (dict(dim=9), 'multiple of num_heads'),
    (dict(mode='axis'), "unexpected keyword argument 'mode'"), (dict(num_classes=0), 'vocab_size must be given'),
    (dict(features_only=True), 'lcsm_sequence has no feature maps'), (dict(conv_size=-1), 'conv_size must be')])
def test_wrong_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        timm.create_model('lcsm_sequence', **{'num_classes': 20, 'num_heads': 2, **options})


def test_a_narrow_feed_forward_network_has_a_channel():
    model = timm.create_model('lcsm_sequence', dim=16, mlp_ratio=0.01)
    assert model.layers[0].glu.down.weight.shape == (16, 1)


def test_a_new_head_takes_no_pooling():
    model = timm.create_model('lcsm_sequence', dim=16)
    with pytest.raises(ValueError, match="global_pool must be None, got 'avg'"):
        model.reset_classifier(5, global_pool='avg')
    model.reset_classifier(5)
    assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 5)


@pytest.mark.parametrize('log_rate', [-5., 0., 2.8, 4.])
@pytest.mark.parametrize('bidirectional', [False, True])
def test_rwkv4_of_one_token_is_its_value(log_rate, bidirectional):
    """Decays e^-16 and e^-55 make the token's own term the only one that counts."""
    recurrence = EosMixer(4, 1, 'rwkv4', 'forward').recurrence
    torch.nn.init.constant_(recurrence.log_rate, log_rate)
    values, none = torch.tensor([1., 2, 3, 4]).view(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)
    y = recurrence.scan(values, {'key': none, 'receptance': none}, bidirectional=bidirectional)
    assert torch.allclose(2 * y, values, rtol=1e-6)


def test_the_model_card_has_the_parameters_near_the_paper():
    model = timm.create_model('lcsm_sequence', num_classes=50_265, dim=512, depth=6, mixer='1-10-1-0', expand_dim=64,
                              gated=False, mlp_ratio=3., device='meta')
    count = sum(p.numel() for name, p in model.named_parameters() if not name.endswith('bias') or 'norm' in name)
    assert f'{count:,} parameters for o = 10' in ' '.join((ROOT / 'model_cards' / 'lcsm.md').read_text().split())
