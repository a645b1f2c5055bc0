"""The published recipes: what `subquad train --dry-run` shows of them, and two steps of each on generated images."""
import json
import re
import shutil

import pytest
import timm
from pairwise import slow, slow_cases
from training_cases import fails, make_images

from subquad.backbones.weights import read_checkpoint
from subquad.backbones.weights.registry import _CVNETS
from subquad.backbones.weights.registry import find as find_weights
from subquad.tools import train
from subquad.tools.data.image_sets import ImageFolder
from subquad.tools.engine.config import find, known_configs, load
from subquad.tools.engine.counting.counts import REPORTED

RECIPES = [name for name in known_configs() if '_in1k' in name or '_in21k' in name]
TRAINED = [name for name in RECIPES if 'in21k' not in name or '-150_' in name]
SMALLEST = [name for name in TRAINED if re.search('-t_|-050_|multiscale|in21k', name)]     # of each family and schedule
# Learning rate, weight decay of the recipes of MobileViTv2, by width.
WIDTHS = {'050': (.0090, .004), '075': (.0090, .008), '100': (.0075, .013), '125': (.0049, .020),
          '150': (.0035, .029), '175': (.0026, .039), '200': (.0020, .050)}
DROP_PATH = {'t': 0.1, 's': 0.15, 'b': 0.4}


def _dry_run(capsys, *arguments):
    assert train.main([*map(str, arguments), '--dry-run', '--json']) == 0
    return json.loads(capsys.readouterr().out)


def test_every_published_size_has_a_recipe():
    assert set(RECIPES) == {
        *(f'{family}-{size}_8xb128-300e_in1k' for family in ('ppma', 'myo', 'lcsm') for size in DROP_PATH),
        *(f'mobilevitv2-{width}_{schedule}' for width in WIDTHS
          for schedule in ('8xb128-300e_in1k', '2xb64-10e_in1k-384px')), 'mobilevitv2-100_8xb128-300e_in1k-multiscale',
        *(f'mobilevitv2-{width}_{schedule}' for width in ('150', '175', '200')
          for schedule in ('32xb128-80e_in21k', '2xb128-50e_in1k-from-in21k'))}


@pytest.mark.parametrize('name', RECIPES)
def test_recipes_name_their_model_and_batch(name):
    config = load(name)
    family, size = re.match(r'(\w+)-(\w+?)_', name).groups()
    sizes = dict(t='tiny', s='small', b='base')
    assert config.model.name == (f'subquad_mobilevitv2_{size}' if size in WIDTHS else f'{family}_{sizes[size]}')
    assert timm.is_model(config.model.name)
    assert config.model.num_classes == (10450 if name.endswith('_in21k') else 1000)
    if size in sizes:
        assert config.model.drop_path_rate == DROP_PATH[size]
    assert config.train_dataloader.batch_size == int(re.search(r'xb(\d+)', name)[1])
    assert config.train_cfg.max_epochs == int(re.search(r'(\d+)e_', name)[1])
    assert config.train_dataloader.drop_last != ('multiscale' in name) and config.model.label_smoothing == 0.1
    if size in WIDTHS and name.endswith('_8xb128-300e_in1k'):
        assert config.optim_wrapper.optimizer.weight_decay == WIDTHS[size][1]


def test_metafile_and_readme_have_the_reported_accuracies():
    yaml, folder = pytest.importorskip('yaml'), find(RECIPES[0]).parent
    text, readme = (folder / 'metafile.yml').read_text(), (folder / 'README.md').read_text()
    content = yaml.safe_load(text)
    entries = {entry['Name']: entry for entry in content['Models']}
    assert len(content['Models']) == len(entries)
    assert {*entries} == {name for name in RECIPES if '_in21k' not in name}
    published = 0
    for name, entry in entries.items():
        config, metadata = load(name), entry['Metadata']
        assert entry['Config'] == f'configs/classification/{name}.py'
        assert metadata['Epochs'] == config.train_cfg.max_epochs
        line, = (line for line in readme.splitlines() if f'({name}.py)' in line)
        cells = [cell.strip() for cell in line.strip('|').split('|')]
        reported = REPORTED.get(config.model.name, ())
        assert metadata.get('Parameters (M)') == (reported[0] if reported else None)
        assert cells[4] == str(metadata.get('Parameters (M)', '-')) and cells[5] == str(metadata.get('FLOPs (G)', '-'))
        tag = next(tag for part, tag in (('ppma', 'in1k'), ('384px', 'cvnets_in1k_384'),
                                         ('from-in21k', 'apple_in22k_ft_in1k'), ('', 'apple_in1k')) if part in name)
        if 'Results' not in entry:
            assert ('multiscale' in name or not reported) and cells[6] == '-' and 'Published File' not in entry
            continue
        weights = find_weights(f'{config.model.name}.{tag}')
        top1 = entry['Results'][0]['Metrics']['Top 1 Accuracy']
        assert top1 == weights.reported['top1'] and cells[6] == str(top1)
        place = 'hf-hub:ZhongchenZhao/PPMA@main/' if 'ppma' in name else f'{_CVNETS}/'
        assert weights.source == place + entry['Published File'] and _CVNETS in text
        optimizer = config.optim_wrapper.optimizer.opt
        assert metadata['Training Techniques'] == ['AdamW' if optimizer == 'adamw' else 'SGD with Momentum']
        published += 1
    assert published == 3 + 7 + 7 + 3
    others = [name for name in known_configs() if find(name).parent == folder and name not in entries]
    for name in others:
        pattern = re.sub(r'^test-\w+?_', 'test-{ppma,myo,lcsm,mobilevitv2}_', name)
        pattern = re.sub(r'^mobilevitv2-\d+', 'mobilevitv2-{150,175,200}', pattern)
        assert f'`{name}`' in readme or f'`{pattern}`' in readme, name


# ---- --dry-run

@pytest.mark.parametrize('size, depth', [('t', 14), *slow_cases(('s', 29), ('b', 45))])
def test_the_options_of_every_parameter_of_ppma(size, depth, capsys, tmp_path, monkeypatch):
    """As the authors publish them: AdamW, 1e-3 at 1,024 images, weight decay 0.05, drop path linear over depth."""
    monkeypatch.chdir(tmp_path)
    found = _dry_run(capsys, f'ppma-{size}_8xb128-300e_in1k', '--processes', 8)
    assert not list(tmp_path.iterdir()), 'nothing is written'
    assert found['batch'] == 1024 and found['steps_per_epoch'] == 1251 and found['epochs'] == 300
    assert found['learning_rate'].startswith('the learning rate is 0.001: 0.0005 for 512 images, scaled to 1,024')
    assert 'there is no data/imagenet/train; 1,281,167 training images' in found['data']
    names = [each['name'] for each in found['parameters']]
    model = timm.create_model(f'ppma_{dict(t="tiny", s="small", b="base")[size]}')
    assert names == [name for name, _ in model.named_parameters()]
    blocks = sorted({tuple(map(int, re.findall(r'\d+', name)[:2])) for name in names if '.blocks.' in name})
    assert len(blocks) == depth
    exempt = set()
    for each in found['parameters']:
        name = each['name']
        assert each['lr'] == pytest.approx(1e-3)
        free = name.endswith(('.bias', '.A_log', '.dt_bias')) or re.search(r'norm\d*\.weight$', name)
        assert each['weight_decay'] == (0. if free else 0.05), name
        exempt.update({name.split('.')[-1]} if free else ())
        if '.blocks.' in name:
            index = blocks.index(tuple(map(int, re.findall(r'\d+', name)[:2])))
            assert each['drop_path'] == pytest.approx(DROP_PATH[size] * index / (depth - 1)), name
        else:
            assert each['drop_path'] is None, name
    assert exempt >= {'A_log', 'dt_bias', 'bias', 'weight'}
    start, peak, middle, end = found['schedule']
    assert start == dict(step=0, epoch=0, lr=pytest.approx(1e-6))
    assert 6 < peak['epoch'] < 7 and peak['lr'] == pytest.approx(9.993e-4, rel=1e-4)
    assert middle['epoch'] == 150 and 4e-4 < middle['lr'] < 6e-4
    assert end['lr'] == pytest.approx(1.0109e-5, rel=1e-4) and end['epoch'] > 299.8


@pytest.mark.parametrize('width', ['050', '200'])
def test_the_schedule_of_mobilevitv2(width, capsys):
    found = _dry_run(capsys, f'mobilevitv2-{width}_8xb128-300e_in1k', '--processes', 8)
    rate, decay = WIDTHS[width]
    start, peak, _, end = found['schedule']
    assert [start['lr'], peak['lr'], end['lr']] == pytest.approx([1e-6, rate, rate / 10], rel=1e-2)
    assert peak['step'] == pytest.approx(20_000, rel=0.01)
    assert {each['weight_decay'] for each in found['parameters']} == {0., decay}
    shorter = _dry_run(capsys, f'mobilevitv2-{width}_8xb128-300e_in1k', '--processes', 8, '--epochs', 10)['schedule']
    ends = [shorter[n]['lr'] for n in (0, 1, -1)]
    assert ends == pytest.approx([1e-6, rate, rate / 10 + 0.9 * rate * 0.0245], rel=1e-2)
    assert all(each['weight_decay'] == (decay if len(each['shape']) > 1 else 0) for each in found['parameters'])


OTHERS = [name for name in RECIPES if not name.startswith('ppma') and '-300e' not in name
          or name.startswith(('myo', 'lcsm'))]


@pytest.mark.parametrize('name', [name for name in OTHERS if name in SMALLEST]
                         + slow(*(name for name in OTHERS if name not in SMALLEST)))
def test_other_recipes_build_model_and_optimizer(name, capsys):
    found = _dry_run(capsys, name, '--processes', 2 if '384px' in name else 8)
    assert all(each['lr'] is not None for each in found['parameters'])
    if '384px' in name:
        assert found['batch'] == 128 and {row['lr'] for row in found['schedule']} == {1e-3}


def test_the_table_joins_parameters_with_the_same_options(capsys):
    assert train.main(['test-ppma_digits', '--dry-run', '--cfg-options', 'model.drop_path_rate=0.1']) == 0
    out = capsys.readouterr().out
    assert 'test_ppma: 3' in out and '1,437 training samples of 10 classes' in out
    assert 'the learning rate is 0.002, not scaled; a step has 64 images (1 process with 64 each)' in out
    assert '20 epochs of 22 steps, 440 steps in all; nothing has been written' in out
    rows = [line for line in out.splitlines() if '0.025' in line]
    assert len(rows) == 2 and ' 0.05 ' in rows[0] and 'stages.1.blocks.0.' in rows[0] and '...' in rows[0]


def test_a_dry_run_without_validation_images_shows_the_training_images(capsys, tmp_path):
    data = make_images(tmp_path / 'data')
    shutil.rmtree(data / 'val')
    found = _dry_run(capsys, 'ppma-tiny_folder', '--model', 'test_ppma', '--data', data)
    assert found['data'] == f'8 training samples of 2 classes; there is no {data}/val to validate on'
    assert found['steps_per_epoch'] == 1


def test_layer_decay_and_iterations_are_shown(capsys):
    found = _dry_run(capsys, 'ppma-tiny_finetune-folder', '--model', 'test_ppma')
    rates = {each['name']: each['lr'] for each in found['parameters']}
    assert rates['head.fc.weight'] == pytest.approx(2e-4) and rates['stem.conv1.conv.weight'] < 1e-4
    found = _dry_run(capsys, 'lcsm_language-stdlib')
    assert found['epochs'] is None and found['steps'] == 600
    assert [row['lr'] for row in found['schedule']] == pytest.approx([5e-5, 5e-3, 2.8e-3, 5e-5], rel=0.1)
    assert 45 <= found['schedule'][1]['step'] <= 52


@pytest.mark.parametrize('arguments, message', [
    (['test-ppma_digits', '--json'], '--json is only for --dry-run'),
    (['test-ppma_digits', '--processes', '2'], '--processes is only for --dry-run'),
    (['test-ppma_digits', '--dry-run', '--processes', '0'], '--processes must be at least 1, got 0'),
    (['test-ppma_digits', '--dry-run', '--resume'], '--dry-run and --resume exclude each other'),
    (['upernet_test-ppma_shapes', '--dry-run'], '--dry-run is for classifiers')])
def test_options_that_do_not_belong_together(arguments, message):
    if arguments[0].startswith('upernet'):
        pytest.importorskip('mmseg')
    fails(arguments, message)


# ---- two steps of each recipe

@pytest.mark.parametrize('name', [*SMALLEST, *slow(*(name for name in TRAINED if name not in SMALLEST))])
def test_two_steps_of_each_recipe(name, images, tmp_path, capsys):
    """With its own network, on small images."""
    size = '(3,64,64)'
    options = ['model.num_classes=2', 'train_dataloader.batch_size=4', 'train_dataloader.num_workers=0',
               'val_dataloader.num_workers=0', f'train_dataloader.dataset.transform.input_size={size}',
               f'val_dataloader.dataset.transform.input_size={size}', 'train_dataloader.pin_memory=False',
               'val_dataloader.pin_memory=False']
    config = name
    if 'multiscale' in name:
        config = tmp_path / f'{name}.py'
        config.write_text(f'_base_ = {str(find(name))!r}\n'
                          'train_dataloader = dict(batch_sampler=dict(size=64, sizes=[32, 64, 96]))\n')
    assert train.main([str(config), '--data', str(images), '--epochs', '1', '--work-dir', str(tmp_path / 'run'),
                       '--cfg-options', *options]) == 0
    error = capsys.readouterr().err
    assert f'training {load(name).model.name} ' in error
    assert '1 epoch of 2 steps' in error and 'the learning rate is ' in error and 'are averages of the weights' in error
    assert read_checkpoint(tmp_path / 'run' / 'best.safetensors')[1]['options']['num_classes'] == 2


def test_a_folder_with_more_classes_than_the_model_is_one_error(images, tmp_path):
    fails(['ppma-t_8xb128-300e_in1k', '--data', str(images), '--work-dir', str(tmp_path / 'run'), '--cfg-options',
           'train_dataloader.batch_size=2'], 'the model has 1000 classes, the data set 2')
    fails(['test-ppma_digits', '--work-dir', str(tmp_path / 'run'), '--cfg-options', 'model.num_classes=7'],
          'the model has 7 classes, the data set 10')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('parts', [('train',), ('train', 'val')])
def test_a_class_folder_without_images_is_one_error(parts, tmp_path):
    data = make_images(tmp_path / 'data')
    for part in parts:
        (data / part / 'empty').mkdir()
        (data / part / 'empty' / 'notes.txt').write_text('no images')
        (data / part / '.cache').mkdir()
    fails(['ppma-tiny_folder', '--data', str(data), '--model', 'test_ppma', '--work-dir', str(tmp_path / 'run')],
          f'{data}/train: the class folder empty has no images; add some or remove it')
    assert not (tmp_path / 'run').exists()
    for part in parts:
        (data / part / 'empty' / 'notes.txt').unlink()
        (data / part / 'empty').rmdir()
    found = ImageFolder(str(data / 'train'))
    assert found.classes == ['dark', 'light'] and len(found) == 8, 'hidden folders do not count'
