"""`subquad weights convert`: formats in both directions, provenance, strictness and hostile files."""
import argparse
import json
import os
import time
import zipfile

import pytest
import timm
import torch
from cvnets_files import authors_file, encoder_entries, ssd_entries, transformers_names
from published_files import serve
from safetensors.torch import save_file
from user_errors import user_error

from subquad.backbones.weights import read_file, read_metadata, save_weights
from subquad.backbones.weights.convert import KEY_MAP_VERSION
from subquad.backbones.weights.mobilevitv2_keys import to_cvnets_keys
from subquad.backbones.weights.ppma_keys import to_published_keys
from subquad.tools import weights as weights_command
from subquad.tools.engine.classification.weight_files import classifier_from_file


def _convert(*words):
    return weights_command.main(['convert', *map(str, words)]) or 0


def _refused(*words, match=None):
    return user_error(lambda: _convert(*words), match=match)


def _equal(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) and first[key].dtype == second[key].dtype for key in first)


@pytest.fixture
def ppma(tmp_path, monkeypatch):
    """Network, weights under published names, and the file of the authors' training with raw and averaged weights."""
    monkeypatch.chdir(tmp_path)
    model = timm.create_model('test_ppma', num_classes=5)
    raw = to_published_keys(model.state_dict())
    averaged = {key: value * 2 if value.is_floating_point() and 'angle' not in key else value
                for key, value in raw.items()}
    torch.save(dict(model=raw, model_ema=averaged, epoch=299, args=argparse.Namespace(lr=1e-3)), 'best.pth')
    return model, raw, averaged


# ---- classifiers

def test_ppma_file_becomes_safetensors_with_provenance(ppma, capsys):
    model = ppma[0]
    assert _convert('best.pth', '--model', 'test_ppma', '--out', 'w.safetensors') == 0
    out, said = capsys.readouterr()
    assert out.startswith('wrote w.safetensors: 183 tensors of test_ppma under the names of subquad, from best.pth')
    assert 'its averaged weights (model_ema) are read, not the raw ones (model)' in said
    content = read_file('w.safetensors')
    assert content.metadata['model'] == 'test_ppma' and content.metadata['options'] == dict(num_classes=5)
    found = content.metadata['provenance']
    assert found['source'] == 'best.pth' and found['format'] == 'ppma' and found['key_map'] == KEY_MAP_VERSION
    assert found['weights'] == 'averaged' and found['source_key'] == 'model_ema'
    assert found['size'] == os.path.getsize('best.pth') and found['sha256'][:12] in out and len(found['sha256']) == 64
    assert found['date'].endswith('+00:00') and 'averaged' in found['notes'][0]
    assert torch.equal(content.weights['head.fc.weight'], model.head.fc.weight * 2)
    loaded, _, _ = classifier_from_file('w.safetensors')              # `subquad predict` needs no --model
    assert torch.equal(loaded.head.fc.weight, model.head.fc.weight * 2)


def test_raw_weights_on_request(ppma, capsys):
    _convert('best.pth', '--model', 'test_ppma', '--out', 'w.safetensors', '--raw', '--json')
    printed = json.loads(capsys.readouterr().out)
    assert printed['name'] == 'test_ppma' and printed['provenance']['source_key'] == 'model'
    content = read_file('w.safetensors')
    assert content.metadata['provenance']['weights'] == 'raw'
    assert _equal(content.weights, ppma[0].state_dict())
    torch.save(dict(model=ppma[1]), 'raw.pth')
    _refused('raw.pth', '--model', 'test_ppma', '--ema', match='it has no averaged weights')


def test_ppma_round_trip_through_files_is_bit_equal(ppma):
    _convert('best.pth', '--model', 'test_ppma', '--out', 'w.safetensors')
    for out in ('back.pth', 'back.safetensors'):
        _convert('w.safetensors', '--to', 'ppma', '--out', out)
        assert _equal(read_file(out).weights, ppma[2])
    assert torch.load('back.pth', weights_only=True)['subquad']['earlier']['source'] == 'best.pth'
    _convert('back.pth', '--model', 'test_ppma', '--out', 'again.safetensors')
    assert _equal(read_file('again.safetensors').weights, read_file('w.safetensors').weights)


@pytest.mark.parametrize('suffix', ['.pt', '.safetensors'])
def test_cvnets_and_transformers_files_convert(suffix, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = timm.create_model('subquad_mobilevitv2_050')
    theirs = to_cvnets_keys(model.state_dict())
    for name, weights in (('cvnets', theirs), ('transformers', transformers_names(theirs))):
        file, out = f'{name}{suffix}', f'{name}_ours.safetensors'
        torch.save(weights, file) if suffix == '.pt' else save_file(weights, file)
        assert _convert(file, '--out', out) == 0                  # the model is found
        assert 'is taken as subquad_mobilevitv2_050 by its keys and shapes' in (said := capsys.readouterr().err)
        assert _equal(read_file(out).weights, model.state_dict())
        assert read_metadata(out)['provenance']['format'] == name
        assert ('taken as those of RGB images' in said) == (name == 'transformers')
    _convert('cvnets_ours.safetensors', '--to', 'cvnets')
    assert _equal(torch.load('subquad_mobilevitv2_050_cvnets.pt', weights_only=True), theirs)
    _convert('cvnets_ours.safetensors', '--to', 'timm')
    timms = timm.create_model('mobilevitv2_050', pretrained=True, pretrained_cfg_overlay=dict(
        file='subquad_mobilevitv2_050_timm.safetensors'))
    assert _equal(timms.state_dict(), model.state_dict())
    save_weights(timms, 'timms.safetensors')
    _convert('timms.safetensors', '--model', 'subquad_mobilevitv2_050', '--out', 'from_timm.safetensors')
    assert _equal(read_file('from_timm.safetensors').weights, model.state_dict())


def test_color_order_is_settled_by_a_reference(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = timm.create_model('test_mobilevitv2')
    save_weights(model, 'rgb.safetensors')
    theirs = transformers_names(to_cvnets_keys(model.state_dict()))
    first = 'mobilevitv2.conv_stem.convolution.weight'
    for name, weight, said in (('rgb', theirs[first], 'so it is for RGB images'),
                               ('bgr', theirs[first].flip(1), 'reversed channels (BGR), and is reversed')):
        torch.save({**theirs, first: weight}, f'{name}.bin')
        _convert(f'{name}.bin', '--model', 'test_mobilevitv2', '--reference', 'rgb.safetensors', '--out',
                 f'from_{name}.safetensors')
        assert said in capsys.readouterr().err
        assert _equal(read_file(f'from_{name}.safetensors').weights, model.state_dict())
    torch.save({**theirs, first: torch.randn_like(weight)}, 'other.bin')
    _refused('other.bin', '--model', 'test_mobilevitv2', '--reference', 'rgb.safetensors', match='neither for RGB nor')


def test_name_of_published_weights_brings_its_transform(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = timm.create_model('subquad_mobilevitv2_050')
    torch.save(to_cvnets_keys(model.state_dict()), 'mobilevitv2-0.5.pt')
    serve(monkeypatch, {'subquad_mobilevitv2_050.cvnets_in1k_384': tmp_path / 'mobilevitv2-0.5.pt'})
    _convert('subquad_mobilevitv2_050.cvnets_in1k_384', '--out', 'w.safetensors')
    transform = read_metadata('w.safetensors')['transform']
    assert transform['input_size'] == [3, 384, 384] and transform['crop_pct'] == 1.0 and transform['mean'] == [0.] * 3
    assert 'is taken as' not in capsys.readouterr().err
    _, preprocess, _ = classifier_from_file('w.safetensors')
    assert '384' in str(preprocess) and 'assuming' not in capsys.readouterr().err


def test_checkpoint_of_a_training_run_converts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = timm.create_model('test_ppma', num_classes=3, depths=(1, 2, 1, 1))
    cfg = "model = dict(type='TimmClassifier', name='test_ppma', num_classes=3, depths=(1, 2, 1, 1))\n"
    torch.save(dict(state_dict={f'net.{key}': value for key, value in model.state_dict().items()},
                    meta=dict(cfg=cfg, epoch=2)), 'epoch_2.pth')
    _convert('epoch_2.pth')
    content = read_file('test_ppma.safetensors')
    assert content.metadata['options'] == dict(num_classes=3, depths=[1, 2, 1, 1])
    assert _equal(content.weights, model.state_dict())
    loaded, _, classes = classifier_from_file('test_ppma.safetensors')
    assert len(classes) == 3 and len(loaded.stages[1].blocks) == 2


# ---- detectors and segmenters

def test_published_ssdlite_is_recognized(tmp_path, monkeypatch, capsys, metafiles_read_once):
    pytest.importorskip('mmdet')
    from mmengine.registry import MODELS, init_default_scope

    from subquad.backbones.mm.checkpoints import load_checkpoint
    from subquad.tools.engine.config import load
    monkeypatch.chdir(tmp_path)
    theirs = authors_file(encoder_entries(0.5), ssd_entries(0.5))
    torch.save(theirs, 'ssd.pt')
    _convert('ssd.pt')
    name = 'ssdlite_mobilevitv2-050_coco-320'
    assert f'is taken as {name}' in capsys.readouterr().err
    metadata = read_metadata(f'{name}.safetensors')
    assert metadata['config'] == name and len(metadata['classes']) == 80 and metadata['network']
    init_default_scope('mmdet')
    load_checkpoint(MODELS.build(load(name).model), f'{name}.safetensors', metadata['classes'])
    _convert(f'{name}.safetensors', '--to', 'cvnets')
    assert _equal(torch.load(f'{name}_cvnets.pt', weights_only=True), theirs)


def test_ppma_detector_round_trip_with_its_config(tmp_path, monkeypatch, metafiles_read_once):
    pytest.importorskip('mmdet')
    from dense_cases import MASK_RCNN, build_small_detector

    from subquad.backbones.mm.published_keys import to_published_keys as to_published
    monkeypatch.chdir(tmp_path)
    model = build_small_detector()
    theirs = to_published(model.state_dict(), model)
    classes = ('circle', 'ring', 'triangle', 'square', 'star')
    torch.save(dict(state_dict=theirs, meta=dict(dataset_meta=dict(classes=classes))), 'epoch_12.pth')
    _convert('epoch_12.pth', '--config', MASK_RCNN, '--out', 'ours.safetensors')
    content = read_file('ours.safetensors')
    assert _equal(content.weights, model.state_dict()) and content.metadata['classes'] == list(classes)
    _convert('ours.safetensors', '--to', 'ppma', '--out', 'back.pth')      # its metadata name the config
    back = torch.load('back.pth', weights_only=True)
    assert _equal(back['state_dict'], theirs) and back['meta']['dataset_meta'] == dict(classes=classes)
    _refused('epoch_12.pth', match='holds a detector or segmenter.* give --config CONFIG')
    for change, message in ((lambda w: w.update({'neck.extra.weight': torch.zeros(1)}), 'not in the model .neck.extra'),
                            (lambda w: w.pop('neck.fpn_convs.0.conv.bias'), '1 keys missing .neck.fpn_convs.0'),
                            (lambda w: w.update({'neck.fpn_convs.0.conv.bias': torch.zeros(1)}), 'shapes differ')):
        weights = dict(theirs)
        change(weights)
        torch.save(dict(state_dict=weights), 'bad.pth')
        _refused('bad.pth', '--config', MASK_RCNN, '--out', 'bad.safetensors', match=message)
        assert not (tmp_path / 'bad.safetensors').exists()


# ---- refusals

def test_arguments_that_do_not_fit_are_refused(ppma, tmp_path):
    _refused('best.pth', '--model', 'test_ppma', '--to', 'cvnets', match="format 'cvnets' is for MobileViTv2")
    _refused('best.pth', '--model', 'test_ppma', '--to', 'timm', match="format 'timm' is for MobileViTv2")
    _refused('best.pth', '--model', 'test_ppma', '--out', 'w.pth', match=r'w.pth must end in .safetensors for the')
    _refused('best.pth', '--model', 'test_pma', match="unknown model 'test_pma'; did you mean test_ppma")
    _refused('best.pth', '--model', 'test_ppma', '--out', tmp_path / 'none' / 'w.safetensors', match='none')
    _refused('none.pth', match='no weight file at none.pth')
    (tmp_path / 'w.safetensors').touch()
    _refused('best.pth', '--model', 'test_ppma', '--out', 'w.safetensors', match='w.safetensors exists; remove it')
    save_weights(timm.create_model('test_vit'), 'vit.safetensors')
    _refused('vit.safetensors', match='is not a classifier of this package, by its keys and shapes: give --model')
    _refused('vit.safetensors', '--model', 'test_ppma', match='keys missing .*keys not in the model')


@pytest.mark.parametrize('change, message', [
    (lambda w: w.pop('proj.weight'), '1 keys missing .head.proj.weight'),
    (lambda w: w.update({'outnorm0.weight': torch.zeros(32), 'outnorm0.bias': torch.zeros(32)}),
     'has 2 weights that this PPMA does not have'),
    (lambda w: w.update({'norm.weight': torch.eye(3).to_sparse()}), 'is sparse')])
def test_published_file_that_does_not_fit_is_refused(change, message, ppma, tmp_path):
    weights = dict(ppma[1])
    change(weights)
    torch.save(dict(model=weights), 'bad.pth')
    _refused('bad.pth', '--model', 'test_ppma', match=message)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != '.pth'] == [], 'nothing is written'


def test_values_that_are_not_finite_warn(ppma, capsys):
    ppma[1]['norm.bias'][3] = float('nan')
    torch.save(dict(model=ppma[1]), 'bad.pth')
    assert _convert('bad.pth', '--model', 'test_ppma') == 0
    assert 'warning: bad.pth holds NaN or infinite values in 1 of 183 tensors (head.norm.bias)' in (
        capsys.readouterr().err)
    assert any('NaN' in note for note in read_metadata('test_ppma.safetensors')['provenance']['notes'])


def _code(path, weights):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(path.parent / 'was_run'),)
    torch.save(dict(model=weights, hook=Code()), path)


def _outside(path, weights):
    torch.save(dict(model=weights), path)
    with zipfile.ZipFile(path, 'a') as archive:
        archive.writestr('../../escaped', b'x')


def _cut(path, weights):
    torch.save(dict(model=weights), path)
    path.write_bytes(path.read_bytes()[:-5000])


@pytest.mark.parametrize('write, name, message', [
    (_code, 'w.pth', r'could run code .*mkdir.* was not read'),
    (_outside, 'w.pth', r'an archive with an entry outside of its folder \(../../escaped\)'),
    (_cut, 'w.pth', 'is damaged'),
    (lambda path, weights: torch.save(torch.ones(3), path), 'w.pth', 'holds no weights'),
    (lambda path, weights: path.mkdir(), 'w.pth', 'is not a file')])
def test_hostile_files_end_in_one_sentence(write, name, message, ppma, tmp_path):
    write(tmp_path / name, ppma[1])
    started = time.monotonic()
    _refused(name, '--model', 'test_ppma', '--out', 'out.safetensors', match=message)
    assert time.monotonic() - started < 20
    assert not (tmp_path / 'was_run').exists() and not list(tmp_path.parent.parent.glob('escaped'))
    assert not (tmp_path / 'out.safetensors').exists()
