"""Subjects of an export: fused norms, baked normalization, metadata, and the errors of wrong requests."""
import json

import pytest
import timm
import torch
from export_cases import subject_of
from families import FAMILIES
from helpers import assert_close
from pairwise import slow
from torch import nn

from lab.export_matrix import randomize_norms
from subquad.tools.common.cli import UserError
from subquad.tools.exporters.graph import check_program, export_program
from subquad.tools.exporters.subject import (
    classifier_from,
    classifier_subject,
    fuse_norms,
    preprocessing,
    random_classifier,
)


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('features', [False, True])
def test_export_form_equals_the_ordinary_model(name, features):
    subject = subject_of(name, features=features, size=(64, 96))
    for seed in range(2):
        images = subject.example(seed=seed)
        assert images.shape == (1, 3, 64, 96)
        outputs = zip(subject.outputs, subject.module(images), subject.eager(images), strict=True)
        for output, actual, expected in outputs:
            assert_close(actual, expected, 5e-5, output)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in subject.module.modules())
    # Two families have none.
    has_norms = any(isinstance(module, nn.BatchNorm2d) for module in subject.eager.modules())
    assert has_norms == (name not in ('test_vmamba', 'test_vim'))


def test_feature_maps_are_named_after_their_strides():
    subject = subject_of('test_mobilevitv2', features=True, size=(64, 128))
    shapes = [tuple(y.shape[2:]) for y in subject.eager(subject.example())]
    assert subject.outputs == ('stride_2', 'stride_4', 'stride_8', 'stride_16', 'stride_32')
    assert shapes == [(64 // n, 128 // n) for n in (2, 4, 8, 16, 32)] and subject.metadata['labels'] == []


def test_norms_of_a_model_in_training_are_not_fused():
    with pytest.raises(AssertionError, match='only for eval'):
        fuse_norms(timm.create_model('test_ppma').train())


def test_norms_of_timm_keep_their_activation():
    model = randomize_norms(timm.create_model('mobilevitv2_050', num_classes=5).eval())
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(images)
        assert_close(fuse_norms(model)(images), expected, 1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_norms_before_their_convolution_are_kept():
    model = randomize_norms(timm.create_model('densenet121', num_classes=5).eval())
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(images)
        assert_close(fuse_norms(model)(images), expected, 1e-4)


def test_transform_of_another_number_of_channels_is_refused():
    read = random_classifier('test_ppma', in_chans=1)
    with pytest.raises(UserError, match='means for 3 channels, but the model takes images of 1'):
        classifier_subject(read, 'random')


def test_assumed_preprocessing_is_reported(capsys):
    read, _ = classifier_from('test_ppma.digits')
    classifier_subject(read._replace(transform={}), 'weights.safetensors')
    assert 'weights.safetensors does not say how to preprocess images; assuming' in capsys.readouterr().err


def test_normalization_in_the_graph_equals_normalization_outside():
    outside, inside = (subject_of('test_ppma', normalize=on) for on in (False, True))
    inside.module.model.load_state_dict(outside.module.state_dict())
    pixels = inside.example()
    assert pixels.min() >= 0 and pixels.max() > 100
    mean, std = (torch.tensor(inside.metadata['preprocessing'][key]).view(1, 3, 1, 1) for key in ('mean', 'std'))
    assert_close(inside.module(pixels)[0], outside.module((pixels / 255 - mean) / std)[0], 1e-5)
    assert inside.metadata['input']['range'] == [0, 255] and inside.metadata['preprocessing']['normalize_in_graph']
    assert not outside.metadata['preprocessing']['normalize_in_graph']


def test_metadata_describe_published_weights():
    read, weights = classifier_from('test_ppma', 'digits')
    subject = classifier_subject(read, weights)
    metadata = json.loads(json.dumps(subject.metadata))
    assert metadata['weights'] == 'test_ppma.digits' and metadata['labels'] == [str(n) for n in range(10)]
    cfg = timm.get_pretrained_cfg('test_ppma.digits')
    assert metadata['preprocessing']['crop'] == list(cfg.input_size[1:])
    assert metadata['preprocessing']['mean'] == list(cfg.mean)
    assert metadata['input']['shape'] == [1, *cfg.input_size]
    assert classifier_from('test_ppma.digits')[1] == 'test_ppma.digits'


@pytest.mark.parametrize('transform, resize', [
    (dict(input_size=(3, 224, 224), crop_pct=0.875), dict(size=256, interpolation='bicubic', keep_ratio=True)),
    (dict(input_size=(3, 32, 64), crop_pct=1.0, interpolation='bilinear'),
     dict(size=[32, 64], interpolation='bilinear', keep_ratio=True)),
    (dict(input_size=(3, 256, 256), crop_pct=0.888, crop_mode='squash'),
     dict(size=[288, 288], interpolation='bicubic', keep_ratio=False))])
def test_preprocessing_of_a_transform(transform, resize):
    described = preprocessing(dict(transform, mean=(0.5,) * 3, std=(0.2,) * 3))
    assert described['resize'] == resize and described['crop'] == list(transform['input_size'][1:])
    with pytest.raises(UserError, match='border'):
        preprocessing(dict(transform, crop_mode='border', mean=(0.5,) * 3, std=(0.2,) * 3))


@pytest.mark.parametrize('make, message', [
    (lambda: subject_of('test_ppma', size=(31, 64)), '31 x 64'),
    (lambda: classifier_from('ppma_tyni'), 'ppma_tiny'),
    (lambda: classifier_from('test_ppma', 'ditigs'), 'ditigs'),
    (lambda: subject_of('myo_sequence'), 'networks for images'),
    (lambda: subject_of('mobilevitv2_050'), 'export subquad_mobilevitv2_050, which has the same weights'),
    (lambda: classifier_subject(random_classifier('test_ppma')._replace(
        model=timm.create_model('test_ppma', num_classes=0)), 'random'), '--features')])
def test_wrong_requests_raise_one_sentence(make, message):
    with pytest.raises(UserError, match=message) as error:
        make()
    assert '\n' not in str(error.value)


class _Refused(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return (self.function(x),)


@pytest.mark.parametrize('function, images, word', [
    (torch.linalg.inv, torch.eye(4) + torch.zeros(1, 3, 4, 4), 'linalg'),
    (lambda x: x.reshape(1, 3, 4, 4, 2).exp(), torch.rand(1, 3, 4, 8), 'exp'),
    (lambda x: nn.functional.unfold(x, 2), torch.rand(1, 3, 4, 4), 'im2col'),
    (lambda x: torch.view_as_complex(x).abs(), torch.rand(1, 3, 4, 2), 'on complex numbers')])
def test_graph_with_a_refused_operator_raises(function, images, word):
    with pytest.raises(UserError, match=word):
        check_program(torch.export.export(_Refused(function), (images,)))


@pytest.mark.parametrize('name', [*slow(*FAMILIES)[1:], 'test_ppma'])
def test_graph_of_every_family_passes(name):
    export_program(subject_of(name, size=(64, 64)))


def test_dynamic_sizes_of_myo_and_lcsm_are_refused():
    with pytest.raises(UserError, match='Myo builds its quad tree for one image size'):
        export_program(subject_of('test_myo', size=(64, 64)), {'hw'})
    with pytest.raises(UserError, match='LCSM unrolls its recurrences for one image size'):
        export_program(subject_of('test_lcsm', size=(64, 64)), {'hw'})


def test_feature_maps_of_one_stride_have_numbers():
    assert classifier_subject(random_classifier('test_vim'), 'random', features=True).outputs[:2] == ('map_0', 'map_1')
    assert classifier_subject(random_classifier('test_ppma'), 'random', features=True).outputs[0] == 'stride_4'
