"""Published segmenters of the MobileViTv2 authors load into DeepLabv3 and PSPNet."""
import pytest
import torch

pytest.importorskip('mmseg')

from cvnets_files import authors_file, encoder_entries, segmenter_entries
from dense_cases import load_segmentation
from mmseg.registry import MODELS

from subquad.backbones.mm import cvnets


@pytest.mark.parametrize('kind', ['deeplabv3', 'pspnet'])
def test_authors_segmenter_files_load(kind):
    weights = authors_file(encoder_entries(0.5), segmenter_entries(0.5, kind))
    assert len(weights) == (313 if kind == 'deeplabv3' else 307)
    cfg = load_segmentation(f'{kind}_mobilevitv2-050_4xb4-120e_ade20k-512x512').model
    model = MODELS.build(cfg)
    translated = cvnets.translate(weights, model)
    assert translated.keys() == model.state_dict().keys() and model.load_state_dict(translated)
    theirs = [value for key, value in weights.items() if key.startswith(('seg_head.aspp.', 'seg_head.psp_layer.'))]
    ours = [value for key, value in model.decode_head.state_dict().items() if 'conv_seg' not in key]
    assert len(theirs) == len(ours) and all(torch.equal(a, b) for a, b in zip(theirs, ours))   # in the same order
    without = {key: value for key, value in weights.items() if '.aux_head.' not in key}
    auxiliary = {key for key in translated if key.startswith('auxiliary_head.')}
    assert len(auxiliary) == 8 and cvnets.translate(without, model).keys() == translated.keys() - auxiliary
    del cfg.auxiliary_head
    model = MODELS.build(cfg)
    assert all(cvnets.translate(file, model).keys() == model.state_dict().keys() for file in (weights, without))
