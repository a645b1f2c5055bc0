"""The page in examples/web prepares pictures as in training, and shows in Chromium what the ordinary model finds."""
import base64
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from browser import browser, missing_programs, served
from dense_cases import make_shapes
from dense_exports import RESIZES, dense_metadata, noisy_picture, pictures, unmatched
from helpers import ROOT
from PIL import Image

from subquad.tools.engine.config import load
from subquad.tools.engine.dense.prediction import Predictor
from subquad.tools.exporters.dense_subject import dense_subject
from subquad.tools.exporters.formats import Options, missing_packages
from subquad.tools.exporters.pipeline import export
from subquad.tools.exporters.subject import classifier_from, classifier_subject, describe, preprocessing

WEB = ROOT / 'examples' / 'web'
SOURCES = ('index.html', 'style.css', 'main.js', 'metadata.js', 'preprocessing.js', 'results.js', 'runtime.js',
           'package.json', 'package-lock.json', '.npmrc')
PACKAGES = 'node_modules/onnxruntime-web/dist'
WASM = ('ort.wasm.bundle.min.mjs', 'ort-wasm-simd-threaded.wasm')                # all that the page needs of them
WEBGPU = ('ort.webgpu.bundle.min.mjs', 'ort-wasm-simd-threaded.asyncify.wasm')   # for browsers with WebGPU
WEIGHTS = 'test_mobilevitv2.digits'
OFFLINE = 'ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|ERR_SOCKET_TIMEOUT'
IDLE, PROBLEM = "document.body.dataset.state === 'idle'", "!document.getElementById('problem').hidden"
needs_node = pytest.mark.skipif(bool(missing_programs('node')), reason=missing_programs('node'))


def _node(script, data):
    """Run a JavaScript module in the page's folder: it gets `data` as JSON, and prints JSON."""
    start = "import {readFileSync} from 'node:fs';\nconst data = JSON.parse(readFileSync(0, 'utf8'));\n"
    done = subprocess.run(['node', '--input-type=module', '-e', start + script], input=json.dumps(data), cwd=WEB,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _onnx_bytes(**props):
    """A small ONNX model with entries of metadata."""
    onnx = pytest.importorskip('onnx')
    value = onnx.helper.make_tensor_value_info('x', onnx.TensorProto.FLOAT, [1, 300])
    weight = onnx.numpy_helper.from_array(np.ones((300, 300), np.float32), 'w')
    node = onnx.helper.make_node('MatMul', ['x', 'w'], ['y'])
    output = onnx.helper.make_tensor_value_info('y', onnx.TensorProto.FLOAT, [1, 300])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], 'graph', [value], [output], [weight]))
    onnx.helper.set_model_props(model, props)
    return model.SerializeToString()


def _read_metadata(content):
    """What metadata.js reads from the bytes of a file: (metadata, name of the error)."""
    script = '''
    import {readMetadata} from './metadata.js';
    let metadata = null, error = null;
    try { metadata = readMetadata(Uint8Array.from(Buffer.from(data, 'base64'))) ?? null; } catch (e) { error = e.name; }
    console.log(JSON.stringify([metadata, error]));
    '''
    return _node(script, base64.b64encode(content).decode())


@needs_node
def test_metadata_are_read_from_the_file():
    metadata = {'model': 'é' * 200, 'labels': ['a', 'b'], 'input': {'shape': [1, 3, 32, 32]}}
    content = _onnx_bytes(other='{}', subquad=json.dumps(metadata, ensure_ascii=False), last='1')
    assert _read_metadata(content) == [metadata, None]
    assert _read_metadata(_onnx_bytes(other='{}')) == [None, None]


@needs_node
def test_damaged_files_are_an_error():
    content = _onnx_bytes(subquad='{}')
    assert _read_metadata(content[:-1]) == [None, 'RangeError']
    assert _read_metadata(content[:1000]) == [None, 'RangeError']
    assert _read_metadata(b'\x89PNG\r\n\x1a\n' + bytes(50))[1] == 'RangeError'
    assert _read_metadata(b'<!doctype html><html>')[1] == 'RangeError'
    assert _read_metadata(_onnx_bytes(subquad='{'))[1] == 'SyntaxError'


def _prepare(picture, metadata):
    """The input that preprocessing.js makes of a picture, (1, C, H, W)."""
    script = '''
    import {prepare} from './preprocessing.js';
    const pixels = Uint8ClampedArray.from(Buffer.from(data.pixels, 'base64'));
    const {input, shape} = prepare({width: data.width, height: data.height, data: pixels}, data.metadata);
    console.log(JSON.stringify({shape, input: Buffer.from(input.buffer).toString('base64')}));
    '''
    pixels = base64.b64encode(picture.convert('RGBA').tobytes()).decode()
    found = _node(script, dict(pixels=pixels, width=picture.width, height=picture.height, metadata=metadata))
    return np.frombuffer(base64.b64decode(found['input']), dtype=np.float32).reshape(found['shape'])


@needs_node
@pytest.mark.parametrize('size', [(160, 107), (94, 125), (64, 64), (31, 20)], ids=str)
@pytest.mark.parametrize('transform', [
    dict(input_size=(3, 64, 64), crop_pct=0.875, interpolation='bicubic'),
    dict(input_size=(3, 64, 64), crop_pct=1.0, interpolation='bilinear'),
    dict(input_size=(3, 48, 32), crop_pct=0.9, interpolation='bicubic', crop_mode='squash'),
    dict(input_size=(3, 48, 64), crop_pct=0.9, interpolation='bilinear'),
    dict(input_size=(1, 32, 32), crop_pct=0.95, interpolation='bilinear'),
], ids=['bicubic', 'bilinear', 'squash', 'oblong', 'gray'])
def test_pictures_are_prepared_as_timm_does(transform, size):
    channels, picture = transform['input_size'][0], noisy_picture(*size)
    transform = dict(transform, mean=(0.485, 0.456, 0.406)[:channels], std=(0.229, 0.224, 0.225)[:channels])
    metadata = describe('model', 'classification', 'random', (1, *transform['input_size']), preprocessing(transform))
    expected = timm.data.create_transform(**transform)(picture.convert('L') if channels == 1 else picture)
    actual = _prepare(picture, metadata)
    assert actual.shape == (1, *expected.shape)
    # One step of 8 bits is 0.017 or more.
    np.testing.assert_allclose(actual[0], expected.numpy(), rtol=0, atol=1e-6)


@needs_node
@pytest.mark.parametrize('size', [(160, 107), (125, 94), (31, 20)], ids=str)
@pytest.mark.parametrize('name', RESIZES)
def test_pictures_of_detectors_and_segmenters_are_prepared_as_in_python(name, size):
    metadata = dense_metadata('detection', name)
    expected, _ = pictures.prepare(noisy_picture(*size), metadata)
    actual = _prepare(noisy_picture(*size), metadata)
    assert actual.shape == expected.shape
    # One step of 8 bits is 0.009 or more.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)


@needs_node
def test_colors_are_those_of_the_python_examples():
    found = _node("import {palette} from './results.js';\nconsole.log(JSON.stringify(palette(data)));", 150)
    np.testing.assert_allclose(found, pictures.palette(150), rtol=0, atol=1)


def test_the_lock_file_names_one_version_and_no_registry():
    lock, package = (json.loads((WEB / name).read_text()) for name in ('package-lock.json', 'package.json'))
    wanted = package['dependencies']
    assert list(wanted) == ['onnxruntime-web'] and re.fullmatch(r'\d+\.\d+\.\d+', wanted['onnxruntime-web'])
    assert lock['packages']['node_modules/onnxruntime-web']['version'] == wanted['onnxruntime-web']
    assert all(entry.get('integrity', '').startswith('sha512-') for name, entry in lock['packages'].items() if name)
    assert not any('resolved' in entry for entry in lock['packages'].values())
    assert 'http' not in json.dumps([entry for name, entry in lock['packages'].items() if name]).replace('funding', '')


def _copy(folder):
    folder.mkdir()
    for name in SOURCES:
        shutil.copy(WEB / name, folder)
    return folder


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    """The page with its packages and the exported classifier of digits, in a folder."""
    reason = missing_programs('chromium', 'chromedriver', 'node', 'npm') or ', '.join(missing_packages('onnx'))
    if reason:
        pytest.skip(reason)
    folder = _copy(tmp_path_factory.mktemp('web') / 'site')
    done = subprocess.run(['npm', 'ci', '--prefer-offline'], cwd=folder, capture_output=True, text=True)
    if done.returncode and re.search(OFFLINE, done.stderr):
        pytest.skip('npm cannot reach its registry')
    assert done.returncode == 0, done.stderr
    subject = classifier_subject(*classifier_from(WEIGHTS))
    assert export(subject, 'onnx', folder / 'model.onnx', repeats=0).passed
    return folder


@pytest.fixture(scope='module')
def chromium(site, tmp_path_factory):
    with browser(tmp_path_factory.mktemp('profile')) as session:
        yield session


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    """Pictures of digits by name, and the probabilities of the ordinary model for them."""
    datasets = pytest.importorskip('sklearn.datasets')
    folder, images = tmp_path_factory.mktemp('digits'), datasets.load_digits().images
    model = timm.create_model(WEIGHTS, pretrained=True).eval()
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    found = {}
    for name, n, size in (('exact', 3, (64, 64)), ('wide', 7, (160, 120)), ('small', 0, (8, 8)),
                          ('high', 4, (300, 500))):
        file = folder / f'{name}.png'
        Image.fromarray((images[n] / 16 * 255).astype(np.uint8)).resize(size).convert('RGB').save(file)
        with torch.inference_mode():
            probabilities = model(prepare(Image.open(file))[None]).softmax(1)[0].tolist()
        found[name] = SimpleNamespace(file=file, probabilities=probabilities, label=str(n))
    return found


def _open(chromium, address):
    chromium.open(f'{address}/index.html')
    chromium.wait(f'{IDLE}')


def _rows(chromium):
    """What the page lists, in order: (label, value, box)."""
    chromium.wait(f"{PROBLEM} || document.body.classList.contains('found') && {IDLE}")
    assert not chromium.run(f'return {PROBLEM}'), chromium.run('return document.body.innerText')
    rows = chromium.run("return [...document.querySelectorAll('#rows li')].map("
                        "({dataset, innerText}) => [dataset.label, Number(dataset.value), dataset.box, innerText])")
    assert all(text.split() == [label, f'{100 * value:.1f}', '%'] for label, value, _, text in rows)
    return [(label, value, box and [float(x) for x in box.split(',')]) for label, value, box, _ in rows]


def _classes(chromium):
    """The labels on the page with their probabilities, in order."""
    return {label: value for label, value, _ in _rows(chromium)}


def _problem(chromium):
    chromium.wait(f'{PROBLEM} && {IDLE}')
    return chromium.run("return document.getElementById('problem').innerText")


@pytest.mark.parametrize('name', ['exact', 'wide', 'small', 'high'])
def test_the_page_finds_the_classes_of_the_ordinary_model(chromium, site, digits, name):
    digit = digits[name]
    with served(site) as address:
        _open(chromium, address)
        assert 'test_mobilevitv2.digits · fp32 · 64 × 64' in chromium.run("return document.body.innerText")
        chromium.choose('#choose-picture', digit.file)
        found = _classes(chromium)
    assert next(iter(found)) == digit.label and len(found) == 5
    assert sorted(found.values(), reverse=True) == list(found.values())
    for label, probability in found.items():
        assert probability == pytest.approx(digit.probabilities[int(label)], abs=1e-4)
    assert [entry for entry in chromium.log() if entry['level'] == 'SEVERE'] == []


@pytest.mark.slow
@pytest.mark.parametrize('precision', ['fp16', 'int8'])
def test_other_precisions_find_the_same_classes(chromium, site, digits, precision, tmp_path):
    subject = classifier_subject(*classifier_from(WEIGHTS))
    images = [subject.prepare(digit.file) for digit in digits.values()] if precision == 'int8' else []
    assert export(subject, 'onnx', tmp_path / 'other.onnx', Options(precision, calibration=images), repeats=0).passed
    with served(site) as address:
        _open(chromium, address)
        chromium.choose('#choose-model', tmp_path / 'other.onnx')
        for digit in digits.values():
            chromium.choose('#choose-picture', digit.file)
            found = _classes(chromium)
            assert f'digits · {precision}' in chromium.run('return document.body.innerText')
            assert next(iter(found)) == digit.label
            assert found[digit.label] == pytest.approx(digit.probabilities[int(digit.label)], abs=0.02)


def test_a_dropped_picture_is_classified(chromium, site, digits):
    content = base64.b64encode(digits['wide'].file.read_bytes()).decode()
    script = '''
    const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], 'dropped.png', {type: 'image/png'}));
    document.querySelector('.drop').dispatchEvent(new DragEvent('drop', {dataTransfer: transfer, bubbles: true}));
    '''
    with served(site) as address:
        _open(chromium, address)
        chromium.run(script, content)
        assert next(iter(_classes(chromium))) == digits['wide'].label
        assert 'dropped.png · 160 × 120' in chromium.run('return document.body.innerText')


def test_errors_are_one_sentence(chromium, site, digits, tmp_path):
    onnx = pytest.importorskip('onnx')
    model = onnx.load(site / 'model.onnx')
    metadata = json.loads({prop.key: prop.value for prop in model.metadata_props}['subquad'])

    def write(name, **props):
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, props)
        onnx.save(model, tmp_path / name)
        return tmp_path / name
    bare, detector = write('bare.onnx'), write('ssd.onnx', subquad=json.dumps(dict(metadata, task='detection')))
    maps = write('maps.onnx', subquad=json.dumps(dict(metadata, task='features')))
    text, damaged = tmp_path / 'text.png', tmp_path / 'damaged.onnx'
    text.write_text('no picture')
    damaged.write_bytes((site / 'model.onnx').read_bytes()[:-100])
    with served(site) as address:
        _open(chromium, address)
        for selector, file, sentence in (
                ('#choose-picture', text, 'text.png is not an image that this browser can read.'),
                ('#choose-model', bare, 'bare.onnx has no metadata of “subquad export”; export the model again.'),
                ('#choose-model', detector, 'ssd.onnx has no output “boxes”; export the model again.'),
                ('#choose-model', maps,
                 'maps.onnx is a model for features, and this page classifies, detects and segments.'),
                ('#choose-model', damaged, 'damaged.onnx is not an ONNX file, or it is damaged.')):
            chromium.choose(selector, file)
            chromium.wait(f'{PROBLEM} && {IDLE} && '
                          f'document.getElementById("problem").innerText.startsWith({json.dumps(file.name)})')
            assert _problem(chromium) == sentence
        chromium.choose('#choose-picture', digits['exact'].file)      # the model before is still there
        assert next(iter(_classes(chromium))) == digits['exact'].label


def _bare_site(site, folder, packages):
    """The page without a model, with these files of its packages."""
    folder = _copy(folder / 'site')
    (folder / PACKAGES).mkdir(parents=True)
    for name in packages:
        (folder / PACKAGES / name).symlink_to(site / PACKAGES / name)
    return folder


def test_a_page_without_a_model_asks_for_one(chromium, site, digits, tmp_path):
    folder = _bare_site(site, tmp_path, WASM)
    with served(folder) as address:
        _open(chromium, address)
        assert _problem(chromium) == \
            'There is no model.onnx beside this page; choose or drop an .onnx file.'
        chromium.choose('#choose-picture', digits['exact'].file)
        chromium.wait(f"{PROBLEM} && document.getElementById('problem').innerText.startsWith('Choose a model')")
        chromium.choose('#choose-model', site / 'model.onnx')
        assert next(iter(_classes(chromium))) == digits['exact'].label


def test_a_page_without_its_packages_says_so(chromium, site, tmp_path):
    folder = _copy(tmp_path / 'site')
    shutil.copy(site / 'model.onnx', folder)
    with served(folder) as address:
        _open(chromium, address)
        assert _problem(chromium) == \
            'onnxruntime-web is not installed; run “npm ci” in this folder and reload the page.'


def _dense_page(chromium, site, subject, files):
    """Open the page with a detector or segmenter and each picture, named by the address, and yield what it lists."""
    path = site / f'{subject.task}.onnx'
    assert export(subject, 'onnx', path, repeats=0).passed
    chromium.log()                                      # those of other tests
    with served(site) as address:
        for file in files:
            shutil.copy(file, site / file.name)
            chromium.open(f'{address}/index.html?model={path.name}&image={file.name}&device=wasm')
            rows = _rows(chromium)
            text = chromium.run('return document.body.innerText')
            assert 'Runs on WebAssembly on one thread: the address asks for it.' in text
            assert f'{file.name} · 128 × 128' in text
            assert re.search(r'Prepared in [\d.]+ ms, (detected|segmented) in [\d.]+ ms', text)
            assert [entry for entry in chromium.log() if entry['level'] == 'SEVERE'] == []
            yield rows


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    """Ten generated images of 128 x 128."""
    folder = tmp_path_factory.mktemp('shapes')
    make_shapes(folder, train=1, val=10, size=128)
    return sorted((folder / 'images/val').iterdir())


@pytest.mark.usefixtures('metafiles_read_once')
def test_the_page_finds_the_objects_of_the_ordinary_model(chromium, site, shapes):
    config, weights = load('ssdlite_test-mobilevitv2_shapes'), 'test_mobilevitv2.ssdlite_shapes'
    config.test_dataloader.dataset.pipeline[1] = dict(type='Resize', scale=(192, 128), keep_ratio=False)
    subject = dense_subject(config, weights, nms=True)
    predictor, count = Predictor(config, weights), 0
    for file, rows in zip(shapes, _dense_page(chromium, site, subject, shapes), strict=True):
        sample = predictor(file)
        sample.pred_instances = sample.pred_instances[sample.pred_instances.scores >= 0.3]
        count += len(sample.pred_instances)
        labels = [subject.metadata['labels'].index(label) for label, _, _ in rows]
        assert unmatched(([np.array(box) for _, _, box in rows], [value for _, value, _ in rows], labels), sample) == 0
    assert count > 10
    # A box is drawn along its border, on a canvas that is larger than this small picture.
    x1, y1, x2, y2 = (round(x * 800 / 128) for x in rows[0][2])
    alpha = chromium.run("return arguments[0].map(([x, y]) => document.getElementById('overlay').getContext('2d')"
                         '.getImageData(x, y, 1, 1).data[3])', [[x2, (y1 + y2) // 2], [(x1 + x2) // 2, y2]])
    assert alpha == [255, 255]


@pytest.mark.usefixtures('metafiles_read_once')
def test_the_page_segments_as_the_ordinary_model(chromium, site, shapes):
    subject = dense_subject(load('deeplabv3_test-mobilevitv2_shapes'), 'test_mobilevitv2.deeplabv3_shapes', (192, 256))
    rows, = _dense_page(chromium, site, subject, shapes[:1])
    with torch.inference_mode():
        expected = subject.eager(subject.prepare(shapes[0]))[1][0, :128, :128].numpy()      # the rest is padding
    shares = {subject.metadata['labels'][n]: (expected == n).mean() for n in np.unique(expected)}
    assert len(shares) >= 2 and {label for label, _, _ in rows} <= set(shares)
    assert all(shares[label] == pytest.approx(value, abs=1e-3) for label, value, _ in rows)
    drawn = chromium.run("const canvas = document.getElementById('overlay');"
                         "return [...canvas.getContext('2d').getImageData(0, 0, 128, 128).data];")
    drawn = np.array(drawn).reshape(128, 128, 4)[..., :3]
    colors = pictures.palette(len(subject.metadata['labels']))[expected]
    assert (abs(drawn - colors) <= 1).all(2).mean() > 0.999


def test_addresses_that_cannot_be_fetched_are_an_error(chromium, site):
    with served(site) as address:
        for name in ('model', 'image'):
            chromium.open(f'{address}/index.html?{name}=missing.file')
            assert _problem(chromium) == \
                'missing.file cannot be fetched; is it there, and does its server let this page read it?'


def test_pictures_of_the_camera_are_classified_until_it_stops(chromium, site):
    with served(site) as address:
        _open(chromium, address)
        chromium.run("document.getElementById('camera').click()")
        chromium.wait("document.body.innerText.includes('Camera · 640 × 480')")
        chromium.wait("document.body.innerText.includes('Stop the camera')")
        time = chromium.run("return document.getElementById('time').innerText")
        chromium.wait(f"document.getElementById('time').innerText !== {json.dumps(time)}")      # the next picture
        chromium.run("document.getElementById('camera').click()")
        chromium.wait(f"{IDLE} && document.body.innerText.includes('Start the camera')")
        assert len(_classes(chromium)) == 5


def test_a_failure_of_webgpu_is_shown_and_the_processor_takes_over(chromium, site, digits):
    with served(site) as address:
        _open(chromium, address)
        chromium.run('navigator.gpu.requestAdapter = async () => ({info: {}});')         # no such device works
        chromium.choose('#choose-model', site / 'model.onnx')
        chromium.choose('#choose-picture', digits['exact'].file)
        assert next(iter(_classes(chromium))) == digits['exact'].label
        assert 'Runs on WebAssembly on one thread: WebGPU fails: ' in chromium.run('return document.body.innerText')


@pytest.mark.slow
def test_webgpu_finds_the_classes_of_the_ordinary_model(site, digits, tmp_path):
    folder = _bare_site(site, tmp_path, WEBGPU)
    shutil.copy(site / 'model.onnx', folder)
    shutil.copy(digits['wide'].file, folder / 'wide.png')
    flags = ('--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader', '--enable-features=Vulkan',
             '--use-vulkan=swiftshader')
    with served(folder) as address, browser(tmp_path / 'profile', *flags) as chromium:
        chromium.open(f'{address}/index.html?device=wasm')
        if not chromium.run('return navigator.gpu?.requestAdapter().then(Boolean) ?? false'):
            pytest.skip('Chromium has no software renderer for WebGPU')
        chromium.open(f'{address}/index.html?device=webgpu&image=wide.png')
        chromium.wait(IDLE, 300)                        # a processor compiles and runs the shaders
        assert 'Runs on WebGPU.' in chromium.run('return document.body.innerText')
        for label, probability in _classes(chromium).items():
            assert probability == pytest.approx(digits['wide'].probabilities[int(label)], abs=1e-3)
