"""Detectors and segmenters of four families: their authors' names, loading and conversion."""
import pytest
import torch

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
import ppma_files
import vmamba_files
from dense_cases import UPERNET, build_on_meta
from golden_networks import assert_same, part, randomize
from mmdet.apis import init_detector
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner.checkpoint import load_checkpoint as lax_load
from mmseg.apis import init_model

from subquad.backbones.mm.checkpoints import load_checkpoint
from subquad.backbones.mm.published_keys import to_published_keys
from subquad.backbones.weights import WeightsError, read_file
from subquad.backbones.weights.convert import convert
from subquad.tools.engine.config import load

# The backbone's options, more of them in a segmenter, its channels, the authors' state dict or the
# first words of its names, and, for names that a file must have, what an error says without them.
FAMILIES = {
    'mlla': (dict(type='MLLA'), {}, [16, 32, 48, 64],
             {'patch_embed', 'layers', 'norm0', 'norm1', 'norm2', 'norm3'},
             {'norm1.bias': 'output_norms.1.bias'}),
    'mambavision': (dict(type='MambaVision'), {}, [12, 24, 48, 96],
                    {'patch_embed', 'levels', 'outnorm0', 'outnorm1', 'outnorm2', 'outnorm3'},
                    {'outnorm1.bias': 'output_norms.1.bias',
                     'levels.2.blocks.0.mixer.conv1d_x.weight': 'stages.2.blocks.0.mixer.conv'}),
    'vmamba': (dict(type='VMamba'), dict(vanilla=True), [16, 32, 64, 128],
               vmamba_files.authors_state,
               {'layers.1.blocks.0.op.Ds': 'stages.1.blocks.0.mixer.scan.D'}),
    'rmt': (dict(type='RMT'), {}, [32, 48, 64, 96], ppma_files.authors_state,
            {'extra_norms.2.weight': 'output_norms.2.weight'})}
OTHERS = {'vmamba': (dict(ssm_ratio=2.), 'ssm_ratio=1, .*and this model has .*ssm_ratio=2'),
          'rmt': (dict(type='PPMA'), 'weights of RMT .*, not of PPMA')}


@pytest.mark.parametrize('name, start', [
    ('mask-rcnn-narrow_test-ppma_shapes', init_detector), (UPERNET, init_model)],
    ids=['mask_rcnn', 'upernet'])
@pytest.mark.parametrize('family', FAMILIES)
def test_published_detectors_and_segmenters_load_strictly(family, name, start, tmp_path):
    options, segmenters, channels, names, missing = FAMILIES[family]
    config = load(name)
    config.model.backbone = dict(arch='test', **options, **(segmenters if name == UPERNET else {}))
    config.model[('decode_head' if name == UPERNET else 'neck')].in_channels = channels
    init_default_scope(config.default_scope)
    model, path = randomize(MODELS.build(config.model)), str(tmp_path / 'epoch_12.pth')
    state = {key: value.clone() for key, value in model.state_dict().items()}
    theirs = to_published_keys(state, model)
    inner = part(theirs, 'backbone.')
    if callable(names):
        assert_same(inner, names(model.backbone), 'Relpos')
    else:
        assert {key.split('.')[0] for key in inner} == names
    assert ('layers.2.blocks.1.attn.rope.rotations' in inner) == (family == 'mlla')
    torch.save(dict(state_dict=theirs, meta={}), path)
    other = start(config.copy(), path, device='cpu')
    assert_same(other.state_dict(), state)
    load_checkpoint(randomize(other), path)
    assert_same(other.state_dict(), state)
    convert(path, tmp_path / 'ours.safetensors', model)
    convert(tmp_path / 'ours.safetensors', tmp_path / 'back.pth', model, family)
    assert_same(read_file(tmp_path / 'back.pth').weights, theirs)
    extra = dict.fromkeys(('norm9.bias', 'outnorm9.bias'), 'not in the model')
    for key, message in {**missing, **extra}.items():
        weights = {**theirs, f'backbone.{key}': torch.zeros(4)}
        if key in missing:
            del weights[f'backbone.{key}']
        torch.save(dict(state_dict=weights), tmp_path / 'wrong.pth')
        for load_it in (lambda: lax_load(model, str(tmp_path / 'wrong.pth')),
                        lambda weights=weights: model.load_state_dict(weights, strict=False)):
            with pytest.raises(WeightsError, match=message):
                load_it()
    if family in OTHERS:
        config.model.backbone.update(OTHERS[family][0])
        with pytest.raises(WeightsError, match=OTHERS[family][1]):
            lax_load(build_on_meta(config), path)
