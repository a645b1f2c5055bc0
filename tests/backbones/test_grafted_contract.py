"""Test that a model grafted by `subquad.graft` still behaves like one of timm's."""
import copy
import pickle

import pytest
import timm
import torch
from graft_cases import MODELS, grads, make, start_decays
from helpers import assert_close
from torch._dynamo.testing import CompileCounter

import subquad


@pytest.mark.parametrize('kind', ['vit', 'dinov3-rope', 'without-prefix'])
@pytest.mark.parametrize('mixer', ['polyline', 'tree', 'eos'])
def test_images_of_any_size(kind, mixer):
    model, _ = make(kind, dynamic_img_size=True)
    own = copy.deepcopy(model)
    subquad.graft(model, mixer)
    for size in ((32, 96), (96, 32), (64, 64)):
        x = torch.randn(1, 3, *size)
        assert model(x).shape == (1, 5)
        if mixer == 'polyline':
            assert_close(model(x), own(x))
    start_decays(model)
    wide, high = torch.randn(1, 3, 32, 96), torch.randn(1, 3, 96, 32)
    first = model(wide)
    model(high)
    assert torch.equal(model(wide), first)


def test_set_input_size_of_a_grafted_model():
    for kind, size in (('vit', (64, 96)), ('swin', (84, 112)), ('swinv2', (64, 160))):
        model, _ = make(kind)
        own = copy.deepcopy(model)
        subquad.graft(model)
        x = torch.randn(1, 3, *size)
        for net in (own, model):
            net.set_input_size(size)
        assert_close(model(x), own(x))


@pytest.mark.parametrize('mixer', ['polyline', 'tree', 'separable'])
@pytest.mark.parametrize('kind', ['vit', 'deit-distilled', 'dinov3-rope', 'swin'])
def test_a_grafted_model_keeps_timms_contract(kind, mixer, tmp_path):
    model, x = make(kind)
    subquad.graft(model, mixer)
    start_decays(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith('gamma') and '.mixer.' not in name:
                parameter.fill_(0.5)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        assert other.patch_embed._forward_pre_hooks is not model.patch_embed._forward_pre_hooks
    fresh = subquad.graft(make(kind)[0], mixer)
    torch.save(model.state_dict(), tmp_path / 'state.pt')
    fresh.load_state_dict(torch.load(tmp_path / 'state.pt'))
    assert torch.equal(fresh(x), expected)
    features = model.forward_features(x)
    assert_close(model.forward_head(features), expected)
    final, levels = model.forward_intermediates(x)
    assert_close(final, features)
    assert all(level.ndim == 4 for level in levels)
    model.reset_classifier(3)
    outputs = model(x)
    assert (outputs[0] if isinstance(outputs, tuple) else outputs).shape[-1] == 3
    model.train()
    assert model(x) is not None and all(module.training for module in model.modules())
    assert not model.eval().training


@pytest.mark.parametrize('kind', ['vit', 'dinov3-rope', 'swin'])
@pytest.mark.parametrize('mixer', ['polyline', 'tree'])
def test_gradient_checkpointing_and_features_only(kind, mixer):
    model, x = make(kind)
    subquad.graft(model, mixer)
    start_decays(model)
    model.train()
    plain = grads(model, x)
    plain = {name: None if grad is None else grad.clone() for name, grad in plain.items()}
    model.set_grad_checkpointing(True)
    for name, grad in grads(model, x).items():
        assert (grad is None) == (plain[name] is None), name
        if grad is not None:
            assert_close(grad, plain[name], 1e-4, name)
    name, options, _ = MODELS[kind]
    torch.manual_seed(0)
    pyramid = timm.create_model(name, **{**options, 'features_only': True}).eval()
    own = [y.detach() for y in pyramid(x)]
    subquad.graft(pyramid, mixer)
    assert [y.shape for y in pyramid(x)] == [y.shape for y in own]
    if mixer == 'polyline':
        for found, wanted in zip(pyramid(x), own):
            assert_close(found, wanted)
    subquad.ungraft(pyramid)
    assert all(torch.equal(found, wanted) for found, wanted in zip(pyramid(x), own))


@pytest.mark.parametrize('kind, mixer', [('vit', 'polyline'), ('without-prefix', 'polyline'), ('swin', 'polyline'),
                                         ('vit', 'tree')])
def test_a_grafted_model_compiles_and_exports(kind, mixer):
    model, x = make(kind)
    subquad.graft(model, mixer)
    start_decays(model)
    with torch.no_grad():
        expected = model(x)
    counter = CompileCounter()
    with torch.no_grad():
        assert_close(torch.compile(model, backend=counter, fullgraph=True)(x), expected, 1e-4)
    assert counter.frame_count == 1
    assert_close(torch.export.export(model, (x,)).module()(x), expected, 1e-4)


def test_masks_dropout_and_bfloat16():
    model, x = make('vit')
    own = copy.deepcopy(model)
    subquad.graft(model)
    for mask in (torch.rand(16, 16) < 0.7, torch.randn(16, 16)):
        mask = mask | torch.eye(16, dtype=torch.bool) if mask.dtype == torch.bool else mask
        assert_close(model.forward_features(x, attn_mask=mask), own.forward_features(x, attn_mask=mask))
    assert_close(model.forward_features(x, is_causal=True), own.forward_features(x, is_causal=True))
    with torch.no_grad():
        assert_close(copy.deepcopy(model).bfloat16()(x.bfloat16()), own(x), 0.1)
        with torch.autocast('cpu', torch.bfloat16):
            assert_close(model(x), own(x), 0.1)
    tree = subquad.graft(copy.deepcopy(own), 'tree')
    with pytest.raises(ValueError, match='grafted with TreeMixer takes no attn_mask and no is_causal'):
        tree.forward_features(x, is_causal=True)
    dropping = subquad.graft(make('vit', attn_drop_rate=0.5)[0]).train()
    torch.manual_seed(0)
    first, second = dropping(x), dropping(x)
    assert not torch.equal(first, second)
    assert torch.equal(dropping.eval()(x), dropping(x))
