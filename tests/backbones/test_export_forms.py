"""The mixers in their export form give the values of the ordinary ones, on odd grids and in exported graphs."""
import copy

import pytest
import torch
from helpers import assert_close
from pairwise import pairwise
from timm import create_model
from torch import nn

from lab.export_matrix import randomize_norms
from subquad.backbones.export import compose_linear, prepare_for_export
from subquad.backbones.mixers import PolylineMixer, TreeMixer
from subquad.backbones.mobilevitv2 import ConvNormAct
from subquad.kernels import rotary_embedding
from subquad.kernels.rotary_embedding.angles import _frequencies, rotary_angles, rotate_flat
from subquad.kernels.trees import level_means, level_means_export, quadtree_levels
from subquad.tools.exporters.subject import fuse_norms


def pair(mixer, *args, **options):
    """An ordinary mixer and one in export form with the same weights, large enough that attention is not uniform."""
    torch.manual_seed(0)
    ordinary = mixer(*args, **options).eval()
    for parameter in ordinary.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    exportable = copy.deepcopy(ordinary)
    prepare_for_export(exportable)
    return ordinary, exportable


@pairwise('size, options', [(1, 1), (1, 6), (5, 7), (8, 4)], [
    dict(), dict(shift_grid=True), dict(parametrization='symmetric', shift_grid=True), dict(parametrization='skew'),
    dict(static_edges=True, max_levels=2)], together=1)
def test_trees(options, size):
    ordinary, exportable = pair(TreeMixer, 12, 3, **options)
    x = torch.randn(2, *size, 12)
    with torch.no_grad():
        expected = ordinary(x)
        assert_close(exportable(x), expected, 1e-5)
        program = torch.export.export(exportable, (x,))
        assert_close(program.module()(x), expected, 1e-5)
    ranks = {node.meta['val'].ndim for node in program.graph.nodes if node.op == 'call_function'
             and isinstance(node.meta.get('val'), torch.Tensor)}
    assert max(ranks) == 4
    # A padded batch has no export form.
    mask = torch.ones(2, *size, dtype=torch.bool)
    with torch.no_grad():
        assert_close(exportable(x, mask), ordinary(x, mask), 1e-5)


@pytest.mark.parametrize('size', [(1, 6), (5, 7), (8, 8)])
@pytest.mark.parametrize('shift', [(0, 0), (1, 2)])
def test_means_over_incomplete_cells(size, shift):
    levels = quadtree_levels(*size, shift=shift)
    x = torch.randn(2, 3, *size)
    for actual, expected in zip(level_means_export(x, levels), level_means(x, levels)):
        assert_close(actual, expected, 1e-6)


@pairwise('attention, masks', ['full', 'crisscross'], [
    ('additive', 'both'), ('multiplicative', 'both'), ('additive', 'v2h'), ('additive', 'rmt')], together=1)
def test_polylines_with_dynamic_sizes(attention, masks):
    ordinary, exportable = pair(PolylineMixer, 12, 3, attention=attention, mask_mode=masks[0], paths=masks[1])
    x = torch.randn(2, 5, 7, 12)
    dims = {axis: torch.export.Dim(name, min=2, max=64) for axis, name in enumerate(('batch', 'height', 'width'))}
    with torch.no_grad():
        assert_close(exportable(x), ordinary(x), 1e-5)
        program = torch.export.export(exportable, (x,), dynamic_shapes=(dims,))
        for shape in ((2, 5, 7), (3, 9, 4)):
            x = torch.randn(*shape, 12)
            assert_close(program.module()(x), ordinary(x), 1e-5)
    assert max(node.meta['val'].ndim for node in program.graph.nodes if node.op == 'call_function'
               and isinstance(node.meta.get('val'), torch.Tensor)) == 4


def test_rotation_of_many_tokens():
    """A frequency that differs in the last digits turns the last of 3136 tokens by an angle that shows."""
    for dim in (16, 20, 32):
        assert torch.equal(torch.from_numpy(_frequencies(dim // 2, torch.float32)),
                           rotary_angles(2, dim, torch.device('cpu'), torch.float32)[1])
    q, k = torch.randn(2, 1, 2, 3136, 16)
    for actual, expected in zip(rotate_flat(q, k, 0.25), rotary_embedding(q, k, scale=0.25)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize('size', [(64, 96), (70, 70)])
@pytest.mark.parametrize('pool, kept, stages', [('avg', None, (2, 3, 4)), ('max', None, (2, 3)), ('avg', (2, 4), (3,))])
def test_composed_linear_maps(pool, kept, stages, size):
    """Linear maps in a row become one, but for maps that are outputs and where the pooling between is not linear."""
    torch.manual_seed(0)
    model = randomize_norms(create_model('subquad_mobilevitv2_050', global_pool=pool).eval())
    composed = fuse_norms(copy.deepcopy(model))
    if kept:                                             # as backbones of detectors say it
        composed.out_indices = kept
    compose_linear(composed)
    exportable = copy.deepcopy(composed)
    prepare_for_export(exportable)
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = model(x)
        assert_close(composed(x), expected, 1e-5)
        assert_close(exportable(x), expected, 1e-5)
    gone = [name for name, module in composed.named_modules() if type(module) is nn.Identity
            and type(model.get_submodule(name)) is ConvNormAct]
    assert gone == ['stages.0.0.conv3_1x1', *(f'stages.{n}.1.conv_proj' for n in stages)]
