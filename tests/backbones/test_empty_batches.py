"""Test batches without images: as timm's own networks, those of this package return empty features and logits."""
import pytest
import timm
import torch

OPTIONS = {
    'test_ppma': [{}, *({'attention': name} for name in ('full', 'crisscross', 'linear', 'decomposed')),
                  {'paths': 'rmt'}, {'mask_mode': 'multiplicative'}],
    'test_mobilevitv2': [{}, {'sampling': 'patch'}, {'attention': 'mha'}, {'exact_size': True}],
    'test_myo': [{}],
    'test_lcsm': [{}, {'mode': 'raster'}, *({'mixer': name} for name in (
        's4', 's5', 'mamba', 'rwkv4', 'deltanet', 'hgrn', 'cosformer', '1-6-1-0', '1-12-1-0'))],
    'convnext_atto': [{}],                                             # timm's own
}


@pytest.mark.parametrize('train', [False, True], ids=['eval', 'train'])
@pytest.mark.parametrize('name, options', [(name, given) for name, all_given in OPTIONS.items() for given in all_given],
                         ids=str)
def test_an_empty_batch_has_empty_logits_and_features(name, options, train):
    model = timm.create_model(name, num_classes=7, **options).train(train)
    images = torch.zeros(0, 3, 64, 64)
    features = model.forward_features(images)
    assert features.shape == (0, model.num_features, 2, 2) and model.forward_head(features).shape == (0, 7)
    with torch.no_grad():
        assert model(images).shape == (0, 7)
    logits = model(images)
    assert logits.shape == (0, 7)
    logits.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
