"""Published weights for tests that must not use a network: files that stand for downloads, and small table entries."""
import warnings

import timm
import torch

from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.registry import WEIGHTS, PublishedWeights


def serve(monkeypatch, files):
    """Answer downloads of these names (name -> path). Return a list that receives the name of each download.

    A cache folder is added to the name: 'NAME in FOLDER'.
    """
    asked = []

    def fetch(weights, cache_dir=None):
        asked.append(f'{weights.name} in {cache_dir}' if cache_dir else weights.name)
        if weights.name not in files:
            raise WeightsError(f'{weights.name} cannot be downloaded')
        return files[weights.name]
    monkeypatch.setattr('subquad.backbones.weights.resolve.fetch', fetch)
    return asked


def publish(monkeypatch, name, **entries):
    """Add weights to the table of published weights, by default those of a small classifier of PPMA."""
    arch, tag = name.split('.')
    entries = {**dict(task='classification', format='ppma', url=f'https://example.org/{name}.pth',
                      input_size=(3, 64, 64), crop_pct=1.0), **entries}
    monkeypatch.setitem(WEIGHTS, name, PublishedWeights(arch, tag, **entries))


def create_pretrained(name, **kwargs):
    """Call timm.create_model(name, pretrained=True, **kwargs). Return the model and the texts of the user warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        model = timm.create_model(name, pretrained=True, **kwargs)
    return model, [str(item.message) for item in caught if issubclass(item.category, UserWarning)]


def create_with_file(name, file, overlay=None, **kwargs):
    """As `create_pretrained`, with the weights of a file."""
    return create_pretrained(name, pretrained_cfg_overlay=dict(file=file, **(overlay or {})), **kwargs)


def check_backbone(model, state, prefix=''):
    """Check that the model's weights outside the head, after removing the prefix, equal those of a state dict."""
    own = {key.removeprefix(prefix): value for key, value in model.state_dict().items()}
    same = {key: torch.equal(own[key], state[key]) for key in own if key in state and not key.startswith('head.')}
    assert len(same) > 30 and all(same.values())
