"""`subquad weights push`: a folder that timm, transformers and the Hub read, written as a whole or not at all."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import timm.data
import torch
from helpers import ROOT
from huggingface_hub import ModelCard
from pairwise import slow
from ppma_files import save_authors_file
from published_files import publish, serve
from safetensors import safe_open
from upload_server import UploadServer
from user_errors import command_error, user_error
from weights_server import use_hub

from subquad.backbones.weights import read_metadata, save_weights
from subquad.tools import weights
from subquad.tools.engine.classification.weight_files import classifier_from_file
from subquad.tools.engine.weights import hub_folder
from subquad.tools.engine.weights.hub_folder import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE

CLASSES = ['a|b', 'c', 'd']
TRANSFORM = dict(input_size=[3, 48, 64], crop_pct=1.0, mean=[0.3, 0.3, 0.3], std=[0.4, 0.4, 0.4],
                 interpolation='bilinear')
OPTIONS = {'test_ppma': dict(mask_mode='multiplicative', drop_path_rate=0.1), 'test_myo': {},
           'test_mobilevitv2': dict(num_latent_tokens=2)}


def _push(*words):
    return weights.main(['push', *map(str, words)])


def _error(*words, match=None):
    return user_error(lambda: _push(*words), match=match)


@pytest.fixture(scope='module', params=sorted(OPTIONS))
def pushed(request, tmp_path_factory):
    """A trained model, and its folder as `push` writes it."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp('push')
    options = dict(num_classes=3, **OPTIONS[request.param])
    model = timm.create_model(request.param, **options).train()
    with torch.no_grad():
        model(torch.rand(4, 3, 64, 64))             # running statistics that differ from those of a new model
    model.eval()
    save_weights(model, folder / 'last.safetensors', dict(
        model=request.param, options=options, classes=CLASSES, transform=TRANSFORM, **{'accuracy/top1': 97.25},
        provenance=dict(source='best.pth', sha256='0123abcd')))
    assert _push(folder / 'last.safetensors', '--out', folder / 'hub', '--license', 'mit') is None
    return model, folder / 'hub'


@pytest.fixture
def ppma(tmp_path):
    """A file of a classifier without metadata."""
    path = tmp_path / 'w.safetensors'
    save_weights(timm.create_model('test_ppma', num_classes=4), path)
    return path


def _same_weights(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.filterwarnings('error')
def test_timm_loads_the_folder(pushed):
    model, folder = pushed
    loaded = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    _same_weights(model, loaded)
    x = torch.rand(2, 3, 48, 64)
    with torch.no_grad():
        assert torch.equal(model(x), loaded(x))            # so the options are the same, too
        features = timm.create_model(f'local-dir:{folder}', pretrained=True, features_only=True).eval()(x)
        expected = model.forward_intermediates(x, intermediates_only=True)
    assert len(features) == len(expected) and all(torch.equal(a, b) for a, b in zip(features, expected))


def test_timm_finds_preprocessing_and_classes(pushed):
    _, folder = pushed
    loaded = timm.create_model(f'local-dir:{folder}')
    config = timm.data.resolve_model_data_config(loaded)
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in config.items() if key in TRANSFORM} == TRANSFORM
    assert loaded.pretrained_cfg['label_names'] == CLASSES and loaded.num_classes == 3
    assert loaded.pretrained_cfg['num_classes'] == 3 and loaded.pretrained_cfg.get('license') is None


def test_weight_file_of_the_folder_needs_no_model_name(pushed, capsys):
    model, folder = pushed
    loaded, transform, classes = classifier_from_file(str(folder / WEIGHTS_FILE))
    _same_weights(model, loaded)
    assert classes == CLASSES and capsys.readouterr().err == ''
    assert read_metadata(folder / WEIGHTS_FILE)['provenance']['source'] == 'best.pth'
    with safe_open(folder / WEIGHTS_FILE, 'pt') as file:
        assert file.metadata()['format'] == 'pt'             # transformers refuses files without it


_TRANSFORMERS = """
import json, sys
import subquad, torch
from transformers import (AutoBackbone, AutoImageProcessor, AutoModelForImageClassification, TimmBackboneConfig,
                          TimmWrapperModel)
folder, inputs = sys.argv[1], torch.load(sys.argv[2])
with torch.no_grad():
    classifier = AutoModelForImageClassification.from_pretrained(folder).eval()
    model = TimmWrapperModel.from_pretrained(folder).eval()
    config = TimmBackboneConfig(backbone=f'local-dir:{folder}', out_indices=[1, 3])
    backbone = AutoBackbone.from_config(config, pretrained=True).eval()
    found = model(inputs, output_hidden_states=True)
    outputs = dict(logits=classifier(inputs).logits, last=found.last_hidden_state, pooled=found.pooler_output,
                   maps=list(found.hidden_states))
    shapes = [list(x.shape) for x in backbone(inputs).feature_maps]
processor = AutoImageProcessor.from_pretrained(folder)
torch.save((outputs, backbone._backbone.state_dict()), sys.argv[2])
print(json.dumps([type(classifier).__name__, list(classifier.config.id2label.values()), processor.data_config, shapes]))
"""


@pytest.mark.parametrize('pushed', ['test_mobilevitv2', *slow('test_myo', 'test_ppma')], indirect=True)
def test_transformers_loads_the_folder(pushed, tmp_path):
    """TimmWrapperModel and the classifier compute what the pushed model does; AutoBackbone has its parameters.

    AutoBackbone (transformers 5.23) gives every timm model the running statistics of new BatchNorm layers.
    """
    pytest.importorskip('transformers', reason='transformers is not installed: pip install transformers')
    model, folder = pushed
    x = torch.rand(1, 3, 64, 64)
    torch.save(x, tmp_path / 'tensors.pt')
    # transformers looks for a package `kernels`, so the checkout, which has a folder of this name, is not on the path.
    for name in ('subquad', 'subquad_cli.py'):
        (tmp_path / name).symlink_to(ROOT / name)
    path = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', _TRANSFORMERS, folder, tmp_path / 'tensors.pt'],
                          cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': os.pathsep.join(path), 'HF_HUB_OFFLINE': '1'})
    assert done.returncode == 0, done.stderr[-3000:]
    kind, classes, transform, shapes = json.loads(done.stdout.splitlines()[-1])
    assert (kind, classes) == ('TimmWrapperForImageClassification', CLASSES)
    assert {key: transform[key] for key in TRANSFORM} == TRANSFORM
    found, state = torch.load(tmp_path / 'tensors.pt')
    with torch.no_grad():
        last, maps = model.forward_intermediates(x)
        expected = dict(logits=model(x), last=last, pooled=model.forward_head(last, pre_logits=True), maps=maps)
    torch.testing.assert_close(found, expected)
    assert shapes == [list(maps[1].shape), list(maps[3].shape)]
    parameters = timm.create_model(f'local-dir:{folder}', pretrained=True, features_only=True,
                                   out_indices=[1, 3]).named_parameters()
    assert all(torch.equal(state[key], value) for key, value in parameters)


def test_card_has_front_matter_of_the_hub(pushed):
    model, folder = pushed
    card = ModelCard.load(folder / CARD_FILE)
    data = card.data.to_dict()
    assert (data['license'], data['library_name'], data['pipeline_tag']) == ('mit', 'timm', 'image-classification')
    assert {'timm', 'transformers', 'subquad'} <= set(data['tags'])
    name = model.pretrained_cfg['architecture']
    assert f'| model | `{name}` |' in card.text and '$' not in card.text and r'3 (a\|b, c, d)' in card.text
    assert '| source | last.safetensors (converted from best.pth, sha256 0123abcd) |' in card.text
    assert '| top1, %, in validation during training | 97.2 |' in card.text and '```bibtex' in card.text
    family = (ROOT / 'model_cards' / f"{name.removeprefix('test_')}.md").read_text()
    title, = re.findall(r'^  title += \{(.*)\}', card.text, re.MULTILINE)
    assert title in family


def test_card_snippet_runs_as_printed(pushed, monkeypatch):
    _, folder = pushed
    code, = re.findall(r'```python\n(.*?)```', (folder / CARD_FILE).read_text(), re.DOTALL)
    monkeypatch.chdir(folder.parent)
    names = {}
    exec(code, names)
    assert names['logits'].shape == (1, 3)


def test_template_is_a_card_of_the_hub():
    card = ModelCard.load(ROOT / 'model_cards' / 'template' / 'pushed_model.md')
    assert card.data.library_name == 'timm' and card.data.license == '$license'


def test_pickle_with_model_name(ppma, tmp_path, monkeypatch, capsys):
    model = timm.create_model('test_ppma', num_classes=4)
    torch.save({'model': model.state_dict()}, tmp_path / 'w.pth')
    monkeypatch.chdir(tmp_path)
    assert _push('w.pth', '--model', 'test_ppma') is None
    output = capsys.readouterr()
    assert "timm.create_model('local-dir:hub/test_ppma', pretrained=True)" in output.out
    assert 'assuming the settings of test_ppma' in output.err and 'the license in the card is "unknown"' in output.err
    _same_weights(model, timm.create_model('local-dir:hub/test_ppma', pretrained=True))
    assert {path.name for path in Path('hub').iterdir()} == {'test_ppma'}
    assert 'does not name its model: give --model NAME' in _error('w.pth')


def test_published_weights_by_name(tmp_path, monkeypatch):
    model = timm.create_model('test_ppma', num_classes=5)
    save_authors_file(model, tmp_path / 'best.pth')
    publish(monkeypatch, 'test_ppma.in1k', num_classes=5, reported={'top1': 82.6}, license='cvnets-license')
    publish(monkeypatch, 'test_ppma.coco', task='detection', config='mask-rcnn_test-ppma_shapes')
    serve(monkeypatch, {'test_ppma.in1k': tmp_path / 'best.pth'})
    monkeypatch.chdir(tmp_path)
    _push('test_ppma.in1k')
    _same_weights(model, timm.create_model('local-dir:hub/test_ppma.in1k', pretrained=True))
    card = ModelCard.load(Path('hub/test_ppma.in1k') / CARD_FILE)
    data = card.data.to_dict()
    assert (data['license'], data['license_name']) == ('other', 'cvnets-license')
    assert '| top1, reported with the weights | 82.6 |' in card.text
    assert '| source | https://example.org/test_ppma.in1k.pth |' in card.text
    assert 'holds a detector or segmenter (mask-rcnn_test-ppma_shapes)' in _error('test_ppma.coco')


def test_json_names_folder_and_address(ppma, tmp_path, capsys):
    _push(ppma, '--model', 'test_ppma', '--out', tmp_path / 'hub', '--json')
    folder = str(tmp_path / 'hub')
    assert json.loads(capsys.readouterr().out) == dict(folder=folder, repository=None, address=f'local-dir:{folder}')


def test_timms_models_can_be_pushed(tmp_path):
    model = timm.create_model('test_resnet', num_classes=2, in_chans=1)
    save_weights(model, tmp_path / 'w.safetensors', dict(model='test_resnet', options=dict(num_classes=2, in_chans=1)))
    _push(tmp_path / 'w.safetensors', '--out', tmp_path / 'hub')
    config = json.loads((tmp_path / 'hub' / CONFIG_FILE).read_text())
    assert config['pretrained_cfg']['input_size'][0] == 1
    _same_weights(model, timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True))
    ModelCard.load(tmp_path / 'hub' / CARD_FILE)


def test_folder_with_files_is_not_replaced_silently(ppma, tmp_path):
    arguments = [ppma, '--model', 'test_ppma', '--out', tmp_path / 'hub']
    _push(*arguments)
    first = (tmp_path / 'hub' / CONFIG_FILE).read_text()
    assert 'holds a model already: give --force' in _error(*arguments)
    (tmp_path / 'hub' / CONFIG_FILE).write_text('{}')
    assert _push(*arguments, '--force') is None and (tmp_path / 'hub' / CONFIG_FILE).read_text() == first
    (tmp_path / 'hub' / 'notes.txt').write_text('mine')
    assert 'holds other files (notes.txt)' in _error(*arguments, '--force')


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), KeyboardInterrupt()])
def test_interrupted_push_leaves_nothing_or_the_old_folder(error, ppma, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise error

    arguments = [ppma, '--model', 'test_ppma', '--out', tmp_path / 'new' / 'hub']
    with monkeypatch.context() as patch:
        patch.setattr(hub_folder.json, 'dumps', fails)
        with pytest.raises((hub_folder.UserError, KeyboardInterrupt)):
            _push(*arguments)
    assert not list((tmp_path / 'new').iterdir())
    _push(*arguments)
    before = {path.name: path.read_bytes() for path in (tmp_path / 'new' / 'hub').iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(hub_folder.json, 'dumps', fails)
        with pytest.raises((hub_folder.UserError, KeyboardInterrupt)):
            _push(*arguments, '--force')
    assert before == {path.name: path.read_bytes() for path in (tmp_path / 'new' / 'hub').iterdir()}
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['hub']


def test_only_image_classifiers_are_pushed(tmp_path):
    model = timm.create_model('test_ppma')
    save_weights(model, tmp_path / 'dense.safetensors', dict(config='mask-rcnn_test-ppma_shapes', classes=['a']))
    assert 'holds a detector or segmenter (mask-rcnn_test-ppma_shapes)' in _error(tmp_path / 'dense.safetensors')
    options = dict(vocab_size=20, dim=8, depth=1)
    save_weights(timm.create_model('myo_sequence', **options), tmp_path / 's.safetensors',
                 dict(model='myo_sequence', options=options))
    assert 'classifies sequences of tokens' in _error(tmp_path / 's.safetensors')
    save_weights(timm.create_model('lcsm_sequence', dim=8), tmp_path / 'l.safetensors',
                 dict(model='lcsm_sequence', options=dict(dim=8)))
    assert 'classifies sequences of tokens' in _error(tmp_path / 'l.safetensors')
    assert 'no weight file' in _error(tmp_path / 'none.safetensors')
    assert not (tmp_path / 'hub').exists()


def test_wrong_arguments_are_refused_before_writing(ppma, tmp_path, monkeypatch):
    monkeypatch.setattr('huggingface_hub.get_token', lambda: None)
    arguments = [ppma, '--model', 'test_ppma', '--out', tmp_path / 'hub']
    assert 'run `hf auth login` or set HF_TOKEN' in _error(*arguments, '--repo', 'owner/name')
    assert '--repo must be OWNER/NAME' in _error(*arguments, '--repo', 'name')
    assert _error(*arguments, '--repo', '../name').startswith('--repo: ')
    assert '--license must be an identifier' in _error(*arguments, '--license', 'MIT: yes')
    assert not (tmp_path / 'hub').exists()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on loopback, which takes uploads of one token."""
    with UploadServer() as server:
        server.token = 'hf_secret'
        use_hub(monkeypatch, server, tmp_path)
        monkeypatch.setenv('HF_TOKEN', 'hf_secret')
        yield server


def test_uploaded_model_loads_from_the_hub(pushed, hub, tmp_path, capsys):
    model, folder = pushed
    arguments = [folder / WEIGHTS_FILE, '--repo', 'owner/small-net', '--private', '--license', 'apache-2.0']
    _push(*arguments, '--out', tmp_path / 'hub')
    assert hub.repositories == {'owner/small-net': True}
    uploaded = hub.models['owner/small-net']['main']['files']
    assert uploaded == {path.name: path.read_bytes() for path in (tmp_path / 'hub').iterdir()}
    assert f'uploaded to {hub.url}/owner/small-net' in capsys.readouterr().out
    card = ModelCard(uploaded[CARD_FILE].decode())
    assert "'hf-hub:owner/small-net'" in card.text and '# small-net' in card.text
    loaded = timm.create_model('hf-hub:owner/small-net', pretrained=True)
    _same_weights(model, loaded)
    assert loaded.pretrained_cfg['label_names'] == CLASSES


def test_failed_upload_keeps_the_folder_and_hides_the_token(ppma, hub, tmp_path, monkeypatch):
    arguments = [ppma, '--model', 'test_ppma', '--out', tmp_path / 'hub', '--repo', 'owner/net']
    hub.refused = 403
    message = _error(*arguments, match='but the upload to owner/net failed .*403.*run the same command with --force')
    assert 'hf_secret' not in message and (tmp_path / 'hub' / WEIGHTS_FILE).exists()
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', 'http://127.0.0.1:9')
    assert 'the upload to owner/net failed (' in _error(*arguments, '--force')
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', hub.url)
    hub.refused = 0
    assert _push(*arguments, '--force') is None
    assert set(hub.models['owner/net']['main']['files']) == {WEIGHTS_FILE, CONFIG_FILE, CARD_FILE}


def test_force_keeps_folders_of_others(tmp_path):
    (tmp_path / 'README.md').write_text('mine')
    command_error(weights.main, ['push', 'test_ppma.digits', '--out', str(tmp_path), '--force'],
                  'holds files that this command did not write')
    assert (tmp_path / 'README.md').read_text() == 'mine'
