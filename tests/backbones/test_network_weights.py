"""Real published files, from the hub itself. `make test-network` runs these tests; nothing else does."""
import pytest
import timm
import torch

from subquad.backbones.weights import load_weights, read_checkpoint
from subquad.backbones.weights.cache import locked_entry, sha256_of
from subquad.backbones.weights.download import check, fetch
from subquad.backbones.weights.registry import find

pytestmark = pytest.mark.network


def _fetch(name):
    weights = find(name)
    path = fetch(weights)
    assert check(weights, path), 'the hub records the sha256 of a large file'
    assert locked_entry(weights.name, weights.source).sha256 == sha256_of(path)
    return path


def _image(side):
    return torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def test_mobilevitv2_has_the_logits_of_timm():
    """timm's own network with its own copy of the weights is the published code."""
    model = timm.create_model('subquad_mobilevitv2_050').eval()
    assert load_weights(model, _fetch('subquad_mobilevitv2_050.cvnets_in1k')) == ''
    theirs = timm.create_model('mobilevitv2_050', pretrained=True).eval()
    with torch.no_grad():
        assert torch.allclose(model(_image(256)), theirs(_image(256)), atol=1e-4)


def test_mobilevitv2_files_of_timm_and_of_the_authors_hold_the_same_weights():
    ours = {}
    for tag in ('cvnets_in1k', 'apple_in1k'):
        model = timm.create_model('subquad_mobilevitv2_050')
        load_weights(model, _fetch(f'subquad_mobilevitv2_050.{tag}'))
        ours[tag] = model.state_dict()
    assert all(torch.equal(value, ours['apple_in1k'][key]) for key, value in ours['cvnets_in1k'].items())


def test_ppma_loads():
    path = _fetch('ppma_tiny.in1k')
    weights, _, source = read_checkpoint(path)
    assert source in ('model_ema', 'model') and sum(value.numel() for value in weights.values()) > 14_000_000
    model = timm.create_model('ppma_tiny').eval()
    assert load_weights(model, path) == source
    with torch.no_grad():
        logits = model(_image(224))
    assert logits.isfinite().all() and logits.std() > .1
