"""Archives of torch.save in which one byte was changed: every loader reads the right weights or refuses the file.

A byte that no reader uses, such as one of the padding, may change. CI runs the short form, `make test-slow` the long
one.
"""
import random

import pytest
import timm
import torch

pytest.importorskip('mmcv')
from download_cases import PATH, plain, serving
from mmengine.runner import CheckpointLoader

from subquad.backbones.mm import PPMA
from subquad.backbones.weights import WeightsError, load_weights, read_checkpoint
from subquad.backbones.weights.convert import convert
from subquad.backbones.weights.download import fetch, forget
from subquad.tools.common.cli import UserError
from subquad.tools.engine.checkpoints.runner_checkpoints import checkpoint_to_resume

OPTIONS = dict(dims=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], mlp_ratios=[1, 1, 1, 1],
               attention=['crisscross', 'crisscross', 'full', 'full'])


def _model():
    return timm.create_model('test_ppma', num_classes=3, head_hidden_size=16, **OPTIONS)


def _write_checkpoint(path):
    """Write what a Runner stores of a small network, and return its weights without their prefix."""
    state = _model().state_dict()
    moments = {number: dict(exp_avg=torch.randn(value.shape)) for number, value in enumerate(list(state.values())[:4])}
    torch.save(dict(state_dict={f'net.{key}': value for key, value in state.items()}, meta=dict(epoch=3),
                    optimizer=dict(state=moments)), path)
    return state


def _classifier(path):
    model = _model()
    load_weights(model, path)
    return model.state_dict()


def _converted(path):
    convert(path, out := path.with_name('converted.safetensors'), _model())
    return read_checkpoint(out)[0]


def _backbone(path):
    backbone = PPMA(arch=OPTIONS, output_norms=False, init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    backbone.init_weights()
    return backbone.state_dict()


def _load_from(path):
    return CheckpointLoader.load_checkpoint(str(path))


def _resume(path):
    return _load_from(checkpoint_to_resume(str(path.parent), str(path)))


def _equal(found, expected):
    """Whether two trees of dicts and tensors are equal; a backbone may lack the classifier."""
    if isinstance(expected, dict):
        return all(_equal(found[key], value) for key, value in expected.items()
                   if key in found or not str(key).startswith('head.'))
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


def _changed(content, seed):
    """Change a byte anywhere, or in the last records with the table of entries, where every byte has a meaning."""
    rng = random.Random(seed)
    at = rng.randrange(len(content) - rng.choice((len(content), 12_000)), len(content))
    value = content[at] ^ 1 << rng.randrange(8) if rng.random() < 0.7 else rng.choice((0, 255))
    return content[:at] + bytes([value]) + content[at + 1:]


def _walk(folder, seeds, monkeypatch):
    path = folder / 'epoch_3.pth'
    state = _write_checkpoint(path)
    content, whole = path.read_bytes(), torch.load(path)
    with serving(folder, monkeypatch) as server:
        def downloaded(path):
            server.add_file(PATH, path.read_bytes())
            forget(plain(server))
            return _load_from(fetch(plain(server)))

        loaders = {_classifier: state, _converted: state, _backbone: state, _load_from: whole, _resume: whole,
                   downloaded: whole}
        for load, expected in loaders.items():
            assert _equal(load(path), expected)
        refused = dict.fromkeys(loaders, 0)
        for seed in seeds:
            path.write_bytes(_changed(content, seed))
            for load, expected in loaders.items():
                try:
                    assert _equal(load(path), expected), (seed, load.__name__)
                except (WeightsError, UserError) as error:
                    refused[load] += 1
                    assert '\n' not in str(error), (seed, load.__name__)
    assert len(set(refused.values())) == 1 and 0 < refused[_resume] < len(seeds), refused


@pytest.mark.filterwarnings('ignore')
def test_one_changed_byte_is_refused_or_has_no_effect(tmp_path, monkeypatch):
    _walk(tmp_path, range(25), monkeypatch)


@pytest.mark.long
@pytest.mark.filterwarnings('ignore')
def test_one_changed_byte_in_2000_files_is_refused_or_has_no_effect(tmp_path, monkeypatch):
    _walk(tmp_path, range(1000, 3000), monkeypatch)
