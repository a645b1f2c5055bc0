"""Published weights in timm: names, downloads, tags and errors of `timm.create_model(NAME, pretrained=True)`."""

import huggingface_hub
import pytest
import timm
import torch
from download_cases import serving
from ppma_files import authors_state, save_authors_file, save_training_file
from published_files import check_backbone, create_pretrained, create_with_file, publish, serve
from weights_server import CHUNK, Fault

from subquad.backbones.weights import WeightsError, load_weights, save_weights
from subquad.backbones.weights.registry import WEIGHTS


@pytest.fixture(scope='module')
def downloads(tmp_path_factory):
    """Files as PPMA's authors and timm publish them, and the state dicts of the networks in them."""
    folder, files, states = tmp_path_factory.mktemp('downloads'), {}, {}
    torch.manual_seed(3)
    for name in ('ppma_tiny.in1k', 'subquad_mobilevitv2_050.cvnets_in1k'):
        model = timm.create_model(name.split('.')[0])
        states[name] = model.state_dict()
        files[name] = folder / f"{name}.{'pth' if 'ppma' in name else 'safetensors'}"
        save_authors_file(model, files[name]) if 'ppma' in name else save_weights(model, files[name])
    return files, states


@pytest.mark.parametrize('name', ['ppma_tiny.in1k', 'subquad_mobilevitv2_050.cvnets_in1k'])
def test_pretrained_loads_published_weights(name, downloads, monkeypatch):
    files, states = downloads
    asked = serve(monkeypatch, files)
    arch, tag = name.split('.')
    for model, said in (create_pretrained(arch), create_pretrained(name), create_pretrained(arch, pretrained_cfg=tag),
                        create_pretrained(arch, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())):
        assert said == [] and all(torch.equal(value, states[name][key]) for key, value in model.state_dict().items())
        assert model.pretrained_cfg == {**timm.get_pretrained_cfg(name).to_dict(), 'num_classes': 1000}
    create_pretrained(arch, cache_dir='folder')
    assert asked == [*[name] * 4, f'{name} in folder']
    model, said = create_pretrained(arch, num_classes=7, in_chans=1)
    check_backbone(model, {key: value for key, value in states[name].items() if not key.startswith('stem.')})
    assert len(said) == 1 and said[0].startswith(f'{name}: its classifier of 1000 classes is left out')
    assert '3 input channels and is adapted to 1' in said[0]
    model, said = create_pretrained(name, features_only=True)
    own = {key.replace('stages_', 'stages.'): value for key, value in model.state_dict().items()}
    assert said == [] and all(torch.equal(value, states[name][key]) for key, value in own.items()) and len(own) > 200


def test_averaged_weights_of_a_published_classifier_are_named(downloads, tmp_path, monkeypatch):
    files, states = downloads
    raw = timm.create_model('ppma_tiny')
    average = timm.create_model('ppma_tiny')
    average.load_state_dict(states['ppma_tiny.in1k'])
    save_authors_file(raw, tmp_path / 'best.pth', average)
    serve(monkeypatch, {'ppma_tiny.in1k': tmp_path / 'best.pth'})
    model, said = create_pretrained('ppma_tiny')
    assert torch.equal(model.head.fc.weight, average.head.fc.weight)
    assert said == ['ppma_tiny.in1k: its averaged weights (model_ema) are read, not the raw ones (model)']
    with pytest.warns(UserWarning, match=r'its raw weights \(model\) are read'):
        assert load_weights(model, 'ppma_tiny.in1k', weights='raw') == 'model'
    assert torch.equal(model.head.fc.weight, raw.head.fc.weight)


def test_published_files_of_another_network_are_refused(downloads, monkeypatch):
    files, _ = downloads
    serve(monkeypatch, {'ppma_tiny.in1k': files['subquad_mobilevitv2_050.cvnets_in1k']})
    for options in ({}, dict(num_classes=10), dict(features_only=True)):
        with pytest.raises(WeightsError, match='^ppma_tiny.in1k is not a checkpoint of this ppma_tiny: '):
            timm.create_model('ppma_tiny', pretrained=True, **options)


def test_a_failed_download_is_raised(monkeypatch):
    serve(monkeypatch, {})
    with pytest.raises(WeightsError, match='^ppma_tiny.in1k cannot be downloaded$'):
        timm.create_model('ppma_tiny', pretrained=True)


@pytest.mark.parametrize('name', ['myo_tiny', 'myo_sequence', 'ppma_base_crisscross'])
def test_networks_without_published_weights_say_which_have_some(name):
    with pytest.raises(WeightsError, match=f'^no weights of {name} are published; pretrained=True works for '
                                           'ppma_tiny.in1k, .*subquad_mobilevitv2_200'):
        timm.create_model(name, pretrained=True)


def test_unknown_and_dense_tags_are_refused(monkeypatch):
    with pytest.raises(WeightsError, match='no weights ppma_tiny.in22k; ppma_tiny has ppma_tiny.in1k'):
        timm.create_model('ppma_tiny.in22k', pretrained=True)
    with pytest.raises(WeightsError, match='ppma_tiny.mask_rcnn_1x_coco are weights for detection, .*features_only'):
        timm.create_model('ppma_tiny.mask_rcnn_1x_coco', pretrained=True)


def test_file_entry_takes_names_and_files_that_timm_cannot_read(tmp_path, monkeypatch):
    """timm reads no pickle with numpy values, and does not know the table of published weights."""
    import numpy as np
    model = timm.create_model('test_ppma', num_classes=0, output_norms=True)
    detector = {f'backbone.{key}': value for key, value in authors_state(model).items()}
    torch.save({'state_dict': {**detector, 'rpn_head.rpn_conv.bias': torch.zeros(1)},
                'meta': dict(score=np.float64(1))}, tmp_path / 'epoch_12.pth')
    publish(monkeypatch, 'test_ppma.mask_rcnn', task='detection')
    serve(monkeypatch, {'test_ppma.mask_rcnn': tmp_path / 'epoch_12.pth'})
    for file in (tmp_path / 'epoch_12.pth', str(tmp_path / 'epoch_12.pth'), 'test_ppma.mask_rcnn',
                 'subquad://test_ppma.mask_rcnn'):
        pyramid, said = create_with_file('test_ppma', file, features_only=True, output_norms=True)
        check_backbone(pyramid, model.state_dict(), 'model.')
        assert not said and 'state_dict' not in pyramid.pretrained_cfg
    with pytest.raises(WeightsError, match='^no weight file at .*none.pth$'):
        create_with_file('test_ppma', str(tmp_path / 'none.pth'))


def test_a_repository_of_the_caller_replaces_published_weights(downloads, monkeypatch):
    """timm itself would look for the published file in the caller's repository."""
    files, states = downloads
    asked, seen = serve(monkeypatch, files), []

    def answer(address, *args, **kwargs):
        seen.append((address, args))
        return dict(states['ppma_tiny.in1k'])
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_hf', answer)
    model, said = create_pretrained('ppma_tiny', pretrained_cfg_overlay=dict(hf_hub_id='me/mine'), num_classes=3)
    assert seen == [('me/mine', ())] and asked == [] and len(said) == 1 and 'me/mine' in said[0]
    check_backbone(model, states['ppma_tiny.in1k'])


def test_an_address_of_the_caller_is_downloaded_whole(monkeypatch, tmp_path):
    """torch.hub keeps half a file, compares no checksums, and takes another file of the same name for this one."""
    torch.manual_seed(1)
    trained = timm.create_model('test_ppma')
    save_training_file(trained, file := tmp_path / 'best.pth')
    content = file.read_bytes()
    with serving(tmp_path, monkeypatch) as server:
        url = server.add_file('/me/best.pth', content)
        overlay, cache = dict(url=url), dict(cache_dir=str(tmp_path / 'cache'))
        server.fail('/me/best.pth', Fault('flip', len(content) // 2), Fault('status', 404))
        for message in (f'^{url}: .*best.part.pth is damaged .*checksum.; it was removed$',
                        'the weights cannot be downloaded: .* does not exist .HTTP 404.$'):
            with pytest.raises(WeightsError, match=message):
                create_pretrained('test_ppma', pretrained_cfg_overlay=overlay)
        server.fail('/me/best.pth', Fault('close', 9 * CHUNK))
        for options in (dict(num_classes=3), {}, cache, cache):
            model, said = create_pretrained('test_ppma', pretrained_cfg_overlay=overlay, **options)
            check_backbone(model, trained.state_dict())
            assert len(said) == len(options.keys() & {'num_classes'}) and all(url in text for text in said)
        assert [request.status for request in server.got('/me/best.pth')] == [200, 404, 200, 206, 200]
        assert not list(tmp_path.rglob('*.part*'))
        monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
        create_pretrained('test_ppma', pretrained_cfg_overlay=overlay)
        with pytest.raises(WeightsError, match='is not in the cache, and HF_HUB_OFFLINE forbids downloads'):
            create_pretrained('test_ppma', pretrained_cfg_overlay=dict(url=f'{url}?other'))


def test_published_classifiers_are_tags_of_timm():
    assert timm.list_pretrained('ppma*') == [f'ppma_{size}.in1k' for size in ('base', 'small', 'tiny')]
    for name, weights in WEIGHTS.items():
        if weights.task != 'classification':
            assert name not in timm.list_pretrained(weights.arch)
            continue
        cfg = timm.get_pretrained_cfg(name)
        assert (name in timm.list_pretrained(f'{weights.arch}*')) == (not weights.page)
        assert {key: getattr(cfg, key) for key in ('input_size', 'crop_pct', 'mean', 'std', 'interpolation', 'license',
                                                   'num_classes')} == {
            key: getattr(weights, key) for key in ('input_size', 'crop_pct', 'mean', 'std', 'interpolation', 'license',
                                                   'num_classes')}
        assert tuple(32 * side for side in cfg.pool_size) == cfg.input_size[1:]
        assert bool(cfg.has_weights) == (not weights.page)
    cfg = timm.get_pretrained_cfg('ppma_small')
    assert (cfg.hf_hub_id, cfg.hf_hub_filename, cfg.tag) == (
        'ZhongchenZhao/PPMA', 'checkpoints/classification/PPMA_S_202504021000/best.pth', 'in1k')
    assert timm.get_pretrained_cfg('myo_tiny').tag == 'untrained'


def test_default_config_keeps_its_number_of_classes(monkeypatch):
    """`timm.create_model(arch)` has 1000 classes, also if only a classifier of ten digits is published."""
    from timm.models import generate_default_cfgs

    from subquad.backbones.timm_interface import image_cfg, published_cfgs
    publish(monkeypatch, 'some_net.digits', num_classes=10, url=None, file='some_net.safetensors')
    cfgs = generate_default_cfgs(published_cfgs({'some_net': image_cfg(), 'other_net': image_cfg()}))
    assert [*cfgs['some_net'].tags] == ['untrained', 'digits'] and [*cfgs['other_net'].tags] == ['untrained']
    digits = cfgs['some_net'].cfgs['digits']
    assert digits.num_classes == 10 and digits.file.endswith('some_net.safetensors') and digits.pool_size == (2, 2)
    assert cfgs['some_net'].default.num_classes == 1000
