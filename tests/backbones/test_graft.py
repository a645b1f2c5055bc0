"""Test what `subquad.graft` and `subquad.ungraft` do to timm's models: outputs, gradients, formulas and errors."""
import copy

import numpy as np
import pytest
import timm
import torch
from graft_cases import MODELS, grads, make, start_decays
from helpers import assert_close, relative_error
from timm.layers import Attention

import subquad
from subquad.backbones.mixers.grafted import Grid, polyline_softmax

MIXERS = ('tree', 'eos:1-1-1-4', 's5', 'separable')


@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'plain'])
@pytest.mark.parametrize('kind', MODELS)
def test_the_polyline_mask_changes_no_output_at_first(kind, fused):
    model, x = make(kind)
    for module in model.modules():
        if hasattr(module, 'fused_attn'):
            module.fused_attn = fused
    with torch.no_grad():
        expected, features = model(x), model.forward_features(x)
        assert subquad.graft(model, 'polyline') is model
        assert_close(model(x), expected)
        assert_close(model.forward_features(x), features)
        start_decays(model)
        assert not torch.allclose(model.forward_features(x), features, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize('kind', MODELS)
def test_gradient_reaches_the_decays_and_training_changes_the_output(kind):
    model, x = make(kind)
    expected = model(x).detach()
    kept = grads(model, x)
    subquad.graft(model)
    own = grads(model, x)
    least = 1e-3 * max(float(grad.abs().max()) for grad in kept.values() if grad is not None)
    for name, grad in kept.items():
        assert grad is None or relative_error(own[name], grad, least) < 1e-3, name
    reached = [own[name].abs().max() > 1e-8 for name in own if name.endswith('.decay.strength')]
    # In the last block, tokens of the image no longer reach a class token, which does not decay.
    assert all(reached[:-1]) and len(reached) == 3
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if '.decay.' in name], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    learned = [p.grad for name, p in model.named_parameters() if name.endswith('decay.path.proj.weight')]
    assert all(grad.any() for grad in learned[:-1])
    assert not torch.allclose(model(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('prefix', [0, 3])
def test_masked_attention_is_the_formula_of_the_paper(prefix):
    """Against a path that is walked step by step, with an additive bias and tokens before the grid."""
    torch.manual_seed(0)
    height, width, heads = 3, 4, 2
    tokens = prefix + height * width
    q, k, v = torch.randn(3, 2, heads, tokens, 5, dtype=torch.float64)
    log_alpha, log_beta = -torch.rand(2, 2, heads, height, width, dtype=torch.float64)
    bias = torch.randn(heads, tokens, tokens, dtype=torch.float64)
    log_mask = torch.zeros(2, heads, tokens, tokens, dtype=torch.float64)
    for i in range(height):
        for j in range(width):
            for row in range(height):
                for column in range(width):
                    across, along = sorted((j, column)), sorted((i, row))
                    log_mask[:, :, prefix + i * width + j, prefix + row * width + column] = (
                        log_alpha[:, :, i, across[0] + 1:across[1] + 1].sum(-1)
                        + log_beta[:, :, along[0] + 1:along[1] + 1, column].sum(-1))
    for extra in (None, bias):
        logits = q @ k.mT if extra is None else q @ k.mT + extra
        expected = sum(0.5 * (logits + mask).softmax(-1) @ v for mask in (log_mask, log_mask.mT))
        for fused in (True, False):
            assert_close(polyline_softmax(q, k, v, log_alpha, log_beta, extra, fused=fused), expected, 1e-9)


def test_decays_of_a_window_do_not_leave_it_and_the_shift_mask_stays():
    """Swin's grafted block equals its own attention with the mask of each window added to the relative bias."""
    model, x = make('swin')
    subquad.graft(model)
    start_decays(model)
    attn = model.layers[0].blocks[1].attn
    mask = model.layers[0].blocks[1].attn_mask
    windows = torch.randn(2 * len(mask), 49, 24)
    y = attn(windows, mask=mask)
    for n in (0, len(mask) - 1, len(mask)):              # each window alone, with its own mask
        assert_close(attn(windows[n:n + 1], mask=mask[n % len(mask)][None]), y[n:n + 1], 1e-4)
    # Tokens that the shift mask separates do not meet, with decays as without.
    blocked = mask[-1][0] < 0
    assert blocked.any()
    inputs = windows[-1:].clone().requires_grad_()
    attn(inputs, mask=mask[-1:])[0, 0].sum().backward()
    assert inputs.grad[0, blocked].abs().max() < 1e-10 < inputs.grad[0, ~blocked].abs().min()


@pytest.mark.parametrize('kind', ['vit', 'without-prefix', 'dinov3-rope', 'swin', 'swinv2'])
@pytest.mark.parametrize('mixer', MIXERS)
def test_other_mixers_start_from_nothing_and_train(kind, mixer):
    model, x = make(kind)
    plain = model(x).detach()
    subquad.graft(model, mixer)
    before = model(x).detach()
    assert before.isfinite().all() and not torch.allclose(before, plain, rtol=1e-3)
    found = grads(model, x)
    assert all(p.requires_grad == (found[name] is not None) for name, p in model.named_parameters())
    gammas = [name for name in found if name.endswith('.gamma') and ('attn.gamma' in name or 'swin' in kind)]
    assert len(gammas) == 3 and all(found[name].any() for name in gammas[:-1])
    added = [p for name, p in model.named_parameters() if name in gammas or '.mixer.' in name]
    losses = []
    for _ in range(3):
        model.zero_grad()
        losses.append(model(x).square().sum())
        losses[-1].backward()
        norm = torch.stack([p.grad.norm() for p in added]).norm()
        with torch.no_grad():
            for parameter in added:
                parameter -= 1e-3 / norm * parameter.grad
    first = gammas[0].replace('.gamma', '.mixer.')
    inner = [p.grad for name, p in model.named_parameters() if name.startswith(first)]
    assert inner and any(grad.any() for grad in inner) and losses[2] < losses[1] < losses[0]


def test_a_mixer_starts_as_the_projection_of_the_mixed_values():
    model, x = make('without-prefix')
    attn = model.blocks[0].attn
    tokens = torch.randn(2, 3, 5, 48)
    q, k, v = attn.qkv(tokens).chunk(3, -1)
    subquad.graft(model, 'separable')
    with torch.no_grad():
        attn.gamma.fill_(1)
        attn.mixer.qkv_proj.weight[0] = 0                # uniform scores
    model.patch_embed(x)                                 # sets the grid
    uniform = attn.proj(v.mean((1, 2), keepdim=True).expand_as(v))
    assert_close(attn(tokens.flatten(1, 2)), uniform.flatten(1, 2))
    subquad.ungraft(model)
    subquad.graft(model, 'tree')
    model.patch_embed(x)
    with torch.no_grad():
        attn.gamma.fill_(1)
    constant = torch.randn(1, 1, 1, 48).expand(2, 3, 5, 48)      # the tree's means of a constant are this constant
    v = attn.qkv(constant).chunk(3, -1)[2]
    assert_close(attn(constant.flatten(1, 2)), attn.proj(v).flatten(1, 2), 1e-4)


def test_prefix_tokens_keep_attention_to_all_tokens_under_other_mixers():
    model, x = make('dinov3-rope')
    own = copy.deepcopy(model)
    seen = {}
    for key, net in (('own', own), ('grafted', subquad.graft(model, 'tree', layers=[0]))):
        net.blocks[0].attn.register_forward_hook(lambda module, inputs, output, key=key: seen.update({key: output}))
        net(x)
    prefix = model.num_prefix_tokens
    assert_close(seen['grafted'][:, :prefix], seen['own'][:, :prefix])
    assert prefix == 5 and not seen['grafted'][:, prefix:].any()


@pytest.mark.parametrize('mixer', ['polyline', 'tree', 'separable'])
@pytest.mark.parametrize('kind', MODELS)
def test_ungraft_restores_the_model(kind, mixer):
    model, x = make(kind)
    frozen = next(p for name, p in model.named_parameters() if 'attn' in name)
    frozen.requires_grad_(False)
    state, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    structure, flags = str(model), {name: p.requires_grad for name, p in parameters.items()}
    expected = model(x)
    subquad.graft(model, mixer)
    assert set(state) < set(model.state_dict())          # the model's own names stay
    assert subquad.ungraft(model) is model
    assert str(model) == structure and torch.equal(model(x), expected)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p is parameters[name] and p.requires_grad == flags[name] for name, p in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    subquad.graft(model, mixer)                          # and it can be grafted again


@pytest.mark.parametrize('layers, expected', [
    ([0, 2], [0, 2]), ([-1], [2]), (['blocks.1'], [1]), (['blocks.1.attn', 0], [0, 1]), (range(2), [0, 1]),
    ((1, 1), [1]), ([np.int64(0), np.int32(-1)], [0, 2])])
def test_layers_select_blocks(layers, expected):
    model, x = make('vit')
    subquad.graft(model, layers=layers)
    assert [n for n, block in enumerate(model.blocks) if hasattr(block.attn, 'decay')] == expected
    assert [n for n, block in enumerate(model.blocks) if type(block.attn) is not Attention] == expected


def test_layers_of_swin():
    model, x = make('swin')
    subquad.graft(model, 'tree', layers=['layers.0.blocks.1', 2])
    grafted = [name for name, module in model.named_modules() if hasattr(module, 'gamma')]
    assert grafted == ['layers.0.blocks.1', 'layers.1.blocks.0']


@pytest.mark.parametrize('layers', ['blocks.1', [], [3], [-4], ['blocks.3'], [True], [1.0], ['head'], 2, [None]])
def test_wrong_layers_are_refused(layers):
    model, _ = make('vit')
    state = str(model)
    with pytest.raises(ValueError, match="layers must be None or a list of indices from -3 to 2 or names from "
                                         "'blocks.0' to 'blocks.2', got") as caught:
        subquad.graft(model, layers=layers)
    assert '\n' not in str(caught.value) and str(model) == state


@pytest.mark.parametrize('mixer', ['polylines', 'eos:x', 'attention', 'depthwise', None, 3, ['tree']])
def test_wrong_mixers_are_refused(mixer):
    with pytest.raises(ValueError, match="mixer must be one of 'polyline', 'tree', .* or 'eos:' with a preset .*, got"):
        subquad.graft(make('vit')[0], mixer)


def test_models_that_cannot_be_grafted_are_refused():
    model, _ = make('vit')
    for wrong in (timm.create_model('resnet18', device='meta'), timm.create_model('test_ppma', device='meta'), 'vit',
                  timm.create_model('beit_base_patch16_224', device='meta', depth=1),
                  torch.nn.Sequential(model, copy.deepcopy(model))):
        for function in (subquad.graft, subquad.ungraft):
            with pytest.raises(TypeError, match='model must be a VisionTransformer, Eva, SwinTransformer or '
                                                'SwinTransformerV2 of timm, or contain one of them, got'):
                function(wrong)
    subquad.graft(model, layers=[0])
    with pytest.raises(ValueError, match='VisionTransformer is grafted already; call subquad.ungraft'):
        subquad.graft(model, 'tree', layers=[1])
    subquad.ungraft(model)
    with pytest.raises(ValueError, match='VisionTransformer is not grafted'):
        subquad.ungraft(model)
    with pytest.raises(ValueError, match='drops patches in training.*patch_drop_rate=0'):
        subquad.graft(make('vit', patch_drop_rate=0.5)[0])
    with pytest.raises(ValueError, match='has no attention that can be grafted: its layers must be Attention, '):
        subquad.graft(timm.create_model('vit_tiny_patch16_224', attn_layer='diff', device='meta', depth=1))


@pytest.mark.parametrize('mixer', ['polyline', 'tree'])
def test_layers_of_several_dtypes_are_refused(mixer):
    model, _ = make('vit')
    model.blocks[1].attn.proj.double()
    state = str(model)
    with pytest.raises(TypeError, match='^blocks.1 cannot be grafted: its attention has parameters of torch.float32 '
                                        'and torch.float64$'):
        subquad.graft(model, mixer)
    assert str(model) == state
    subquad.graft(model, mixer, layers=[0, 2])


def test_tokens_without_a_grid_are_refused():
    model, x = make('vit')
    subquad.graft(model)
    model(x)
    with pytest.raises(ValueError, match='got 9 image tokens, but the grid of patches is 3 x 5'):
        model.blocks[0](torch.randn(1, 10, 48))
    grid = Grid(1)
    grid.size, grid.sizes = (2, 3), {6: {(2, 3)}, 8: {(2, 4)}, 12: {(3, 4), (4, 3)}}
    assert grid.of(torch.zeros(1, 9, 4)) == (2, 4)       # of an earlier pass
    with pytest.raises(ValueError, match='got 12 image tokens, but the grid of patches is 2 x 3'):
        grid.of(torch.zeros(1, 13, 4))
