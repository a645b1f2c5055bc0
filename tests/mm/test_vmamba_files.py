"""Detectors and segmenters of VMamba's authors: starting weights, weight decay, and all configs."""
import pytest
import timm
import torch

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from dense_cases import build_published, check_schedule, weight_decays
from golden_networks import on_meta, part, shapes
from pairwise import slow
from vmamba_files import authors_name, authors_state

from subquad.backbones.mm import VMamba
from subquad.backbones.mm.published_keys import to_published_keys
from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.registry import WEIGHTS
from subquad.tools.engine.config import load

CONFIGS = {row.config: row for row in WEIGHTS.values() if row.format == 'vmamba' and row.config}
FIRST = ('mask-rcnn_vmamba-t-s1l8_fpn_1x_coco', 'upernet_vmamba-vanilla-b_4xb4-160k_ade20k-512x512')


def test_a_classifiers_file_starts_a_backbone(tmp_path):
    """It may lack the output norms, all at once, and has a classifier to spare."""
    classifier = timm.create_model('test_vmamba')
    state, key = authors_state(classifier), 'stages.2.blocks.1.mixer.scan.A_log'
    torch.save({'model': state}, tmp_path / 'ckpt.pth')
    for indices in ((0, 1, 2, 3), (0, 2)):
        backbone = VMamba('test', out_indices=indices, init_cfg=dict(type='Pretrained',
                                                                     checkpoint=str(tmp_path / 'ckpt.pth')))
        with pytest.warns(UserWarning, match='it has no output norms; they start untrained'):
            backbone.init_weights()
        assert torch.equal(backbone.state_dict()[key], classifier.state_dict()[key])
    state['layers.0.blocks.0.op.out_norm.weight'] = state.pop('layers.0.blocks.0.norm.weight')[:3]
    torch.save({'model': state}, tmp_path / 'bad.pth')
    backbone = VMamba('test', init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'bad.pth')))
    with pytest.raises(WeightsError, match='keys missing .stages.0.blocks.0.norm1.weight.*shapes differ'):
        backbone.init_weights()


@pytest.mark.parametrize('name', [*FIRST, *slow(*(name for name in CONFIGS if name not in FIRST))])
def test_every_config_builds_the_network_of_its_file(name):
    """Names and shapes of the whole network, its recipe, and weight decay by the authors' names."""
    config, row = load(name), CONFIGS[name]
    model = build_published(config)
    inner = shapes(part(to_published_keys(model.state_dict(), model), 'backbone.'))
    expected = shapes(authors_state(on_meta(row.arch)))
    assert {key: shape for key, shape in inner.items() if not key.startswith('outnorm')} == {
        key: shape for key, shape in expected.items() if not key.startswith('classifier')}
    assert [inner[f'outnorm{n}.bias'] for n in range(4)] == [(width,) for width in model.backbone.out_channels]
    decays, rates = weight_decays(model, config)
    detection, vanilla = row.task == 'detection', 'vanilla' in row.arch
    for key, value in model.backbone.named_parameters():
        full = 0 if 'norm' in authors_name(key, vanilla) else 0.05 if detection else 0.01
        assert decays[id(value)] == full, key
    assert rates == {1e-4 if detection else 6e-5}
    assert config.param_scheduler[0].end == (1000 if detection else 1500)
    check_schedule(config, '3x' in row.tag)
    if detection:
        assert config.train_dataloader.batch_size == (1 if 'bs8' in row.tag else 2)
    else:
        assert config.param_scheduler[1].begin == 1500
