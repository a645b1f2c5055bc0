"""Test that a model grafted by `subquad.graft` still behaves like one of timm's."""
import copy
import pickle
from functools import partial

import pytest
import timm
import torch
from graft_cases import MODELS, grads, make, start_decays
from helpers import assert_close
from timm.layers import set_reentrant_ckpt
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

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


def _open_gammas(model):
    """Let the mixers of a graft show in the outputs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith('gamma') and '.mixer.' not in name:
                parameter.fill_(0.5)


@pytest.mark.parametrize('mixer', ['polyline', 'tree', 'separable'])
@pytest.mark.parametrize('kind', ['vit', 'deit-distilled', 'dinov3-rope', 'swin'])
def test_a_grafted_model_keeps_timms_contract(kind, mixer, tmp_path):
    model, x = make(kind)
    subquad.graft(model, mixer)
    start_decays(model)
    _open_gammas(model)
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


def _gradients(model, images, run=None):
    """Return the gradients after one backward pass through the outputs of several images."""
    model.zero_grad()
    sum((run or model)(image).square().sum() for image in images).backward()
    return [parameter.grad for parameter in model.parameters()]


def _assert_all_close(found, expected):
    assert any(grad is not None for grad in expected)
    for grad, wanted in zip(found, expected):
        assert (grad is None) == (wanted is None)
        if grad is not None:
            assert_close(grad, wanted, 1e-4)


@pytest.mark.parametrize('kind, mixer, reentrant', [
    ('vit', 'polyline', False), ('vit', 'polyline', True), ('without-prefix', 'tree', False), ('vit', 'tree', True),
    ('dinov3-rope', 'polyline', False)])
def test_gradient_checkpointing_of_several_grids(kind, mixer, reentrant):
    """Each recomputation uses the grid of its own forward pass, also if a later image has as many tokens."""
    model, _ = make(kind, dynamic_img_size=True)
    subquad.graft(model, mixer)
    start_decays(model)
    _open_gammas(model)
    model = copy.deepcopy(model)
    images = [torch.randn(1, 3, *size) for size in ((32, 96), (96, 32), (64, 64))]
    expected = _gradients(model, images)
    model.set_grad_checkpointing(True)
    set_reentrant_ckpt(reentrant)
    try:
        found = _gradients(model, images)
    finally:
        set_reentrant_ckpt(False)
    _assert_all_close(found, expected)


class _Blocks(torch.nn.Module):
    """Blocks in place of a model's, of which the first two are one checkpoint."""

    def __init__(self, blocks, repeat):
        super().__init__()
        self.first, self.last, self.repeat = torch.nn.Sequential(*blocks[:2]), blocks[2], repeat

    def forward(self, x):
        return self.last(self.repeat(self.first, x))


@pytest.mark.parametrize('part', ['model', 'blocks in a model', 'two blocks', 'attention'])
def test_checkpoints_of_other_parts_use_their_own_grid(part):
    model, _ = make('vit', dynamic_img_size=True)
    subquad.graft(model)
    start_decays(model)
    images = [torch.randn(1, 3, *size) for size in ((32, 96), (96, 32))]
    expected = _gradients(model, images)
    repeat = partial(checkpoint, use_reentrant=False)
    if part == 'two blocks':
        model.blocks = _Blocks(model.blocks, repeat)
    if part == 'attention':
        for block in model.blocks:
            block.attn.forward = partial(repeat, block.attn.forward)
    model.set_grad_checkpointing(part == 'blocks in a model')
    _assert_all_close(_gradients(model, images, partial(repeat, model) if 'model' in part else None), expected)


def test_a_checkpoint_of_an_unknown_grid_is_refused():
    """Where the tokens of a recomputation come with no image, and grids of several forward passes have their number."""
    model, _ = make('vit', dynamic_img_size=True)
    subquad.graft(model)
    start_decays(model)

    def attend(x):
        return model.blocks[0].attn(x + 0)

    def loss(size):
        x = model.patch_embed(torch.randn(1, 3, *size))
        tokens = torch.cat((model.cls_token, x.flatten(1, 2)), 1)
        return checkpoint(attend, tokens, use_reentrant=False).square().sum()
    loss((32, 96)).backward()
    unknown = loss((96, 32))
    with pytest.raises(ValueError, match=r'the grafted layer got 12 image tokens in a backward pass.* 2 x 6, 6 x 2'):
        unknown.backward()


@pytest.mark.parametrize('kind, mixer', [
    ('swin', 'polyline'), *(pytest.param(kind, mixer, marks=pytest.mark.slow) for kind, mixer in (
        ('vit', 'polyline'), ('without-prefix', 'polyline'), ('vit', 'tree')))])
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
