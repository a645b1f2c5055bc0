"""The export form of MobileViTv2: values for all options, numerics, and what its graph consists of."""
from collections import Counter

import pytest
import timm
import torch
from export_cases import subject_of
from helpers import assert_close
from torch import nn

from lab.export_matrix import randomize_norms
from subquad.backbones.export import ExportBlock, HalvedResidual, ImageNorm, prepare_for_export, with_maps
from subquad.backbones.mobilevitv2 import MobileViTv2Block
from subquad.tools.exporters.graph import export_program
from subquad.tools.exporters.subject import fuse_norms

NAME = 'test_mobilevitv2'


def pair(fuse=True, **options):
    """The ordinary model and its export form with the same weights."""
    eager = randomize_norms(timm.create_model(NAME, **options).eval())
    form = timm.create_model(NAME, **options).eval()
    form.load_state_dict(eager.state_dict())
    prepared = prepare_for_export(fuse_norms(form) if fuse else form)
    return eager, form, prepared


@pytest.mark.parametrize('options', [{}, {'sampling': 'patch'}, {'num_latent_tokens': 3}, {'output_stride': 8}])
@pytest.mark.parametrize('fuse, convert', [(True, None), (False, None), (True, with_maps)])
def test_export_form_equals_the_ordinary_model(fuse, convert, options):
    eager, form, prepared = pair(fuse, **options)
    assert len(prepared) == 3 and all(isinstance(form.get_submodule(name), ExportBlock) for name in prepared)
    form = convert(form) if convert else form
    maps = convert and options.get('sampling') != 'patch'
    assert not maps or not any(isinstance(module, ExportBlock) for module in form.modules())
    halved = sum(isinstance(module, HalvedResidual) for module in form.modules())
    assert halved == (0 if not convert else 2 if 'output_stride' in options else 4)
    with torch.no_grad():
        for batch, height, width in ((1, 64, 64), (2, 64, 128), (3, 96, 64), (1, 72, 104)):
            images = torch.randn(batch, 3, height, width)
            for actual, expected in zip(form.forward_intermediates(images)[1], eager.forward_intermediates(images)[1],
                                        strict=True):
                assert_close(actual, expected, 2e-5, f'{options} {height} x {width}')
            assert_close(form(images), eager(images), 2e-5, f'logits of {options} {height} x {width}')


@pytest.mark.parametrize('options', [{'attention': 'mha'}, {'exact_size': True}])
def test_blocks_that_the_form_does_not_cover_are_kept(options):
    eager, form, prepared = pair(**options)
    assert prepared == [] and sum(isinstance(module, MobileViTv2Block) for module in form.modules()) == 3
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_close(form(images), eager(images), 2e-5)


def test_blocks_with_an_adapter_are_kept():
    model = timm.create_model(NAME).eval()
    attention = model.stages[2][1].transformer[0].attn
    attention.qkv_proj.register_forward_hook(lambda module, args, y: y + 1)
    assert prepare_for_export(model) == ['stages.3.1', 'stages.4.1']


def test_models_of_other_families_are_not_changed():
    model = timm.create_model('test_ppma').eval()
    before = [id(module) for module in model.modules()]
    assert prepare_for_export(model) == [] and [id(module) for module in model.modules()] == before


def test_training_mode_is_refused():
    with pytest.raises(ValueError, match='evaluation mode'):
        prepare_for_export(timm.create_model(NAME))


@pytest.mark.parametrize('offset', [0., 1e3])
def test_norm_with_a_large_mean_is_exact(offset):
    norm = nn.GroupNorm(1, 8)
    x = torch.randn(2, 8, 4, 4) + offset
    expected = norm.double()(x.double()).float()
    rows = x.permute(0, 2, 3, 1).reshape(-1, 8)
    actual = ImageNorm(norm)(rows, 16).reshape(2, 4, 4, 8).permute(0, 3, 1, 2)
    assert_close(actual, expected, 1e-3 if offset else 1e-5)


def test_graph_has_one_linear_layer_for_each_product_and_no_operator_that_runtimes_lack():
    program = export_program(subject_of(NAME))
    names = Counter(str(node.target).removeprefix('aten.').split('.')[0] for node in program.graph.nodes
                    if node.op == 'call_function')
    layers, blocks = 9, 3
    # query, key, value, out, fc1, fc2; classifier. The map at the end of a block is part of the one that follows.
    assert names['linear'] == 6 * layers + 1
    assert names['bmm'] == layers and names['group_norm'] == 2 * layers + blocks
    assert not set(names) & {'expand', 'expand_as', 'split', 'split_with_sizes', 'slice', 'arange', 'eye', 'as_strided',
                             'unfold', 'im2col', 'pixel_shuffle', 'sum', 'repeat', 'index'}
    assert all(node.meta['val'].ndim <= 4 for node in program.graph.nodes
               if isinstance(node.meta.get('val'), torch.Tensor))


def test_norm_of_one_channel_has_a_form_for_xnnpack():
    from subquad.tools.exporters.xnnpack_forms import FORMS
    form = FORMS[torch.ops.aten.group_norm.default]
    for length in (8 * 96, 64 * 24, 35):
        x = 3 * torch.randn(2, 1, length) + 5
        assert_close(form(x, 1), nn.functional.group_norm(x.double(), 1).float(), 1e-5, str(length))
    assert form(torch.randn(2, 2, 8), 1) is NotImplemented


@pytest.mark.slow
def test_executorch_delegates_the_whole_network(tmp_path):
    pytest.importorskip('executorch')
    from subquad.tools.exporters import to_executorch
    from subquad.tools.exporters.formats import Options
    conversion = to_executorch.convert(subject_of('subquad_mobilevitv2_050'), Options(), tmp_path / 'model.pte')
    assert sum(conversion.operators.values()) <= 4 and conversion.delegates <= 4
    assert conversion.delegated_macs >= 0.99
