"""The command line as a newcomer meets it: training, testing, predicting, and one clear error for each mistake."""
import json
import re
import shutil
import time

import numpy as np
import pytest
import torch
from families import FAMILIES
from PIL import Image
from user_errors import command_error

from subquad.backbones.weights import save_weights
from subquad.tools import models, predict, stats, test, train
from subquad.tools.common import cli
from subquad.tools.common.cli import UserError
from subquad.tools.engine.classification import evaluation


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Two epochs on digits: (folder, weights)."""
    folder = tmp_path_factory.mktemp('run')
    assert train.main(['test-ppma_digits', '--epochs', '2', '--work-dir', str(folder)]) == 0
    return folder, folder / 'last.safetensors'


@pytest.fixture
def images(tmp_path):
    """FOLDER/{train,val}/{light,dark}/*.png, trivially separable."""
    rng = np.random.default_rng(0)
    for part in ('train', 'val'):
        for name, level in (('dark', 40), ('light', 200)):
            (tmp_path / 'data' / part / name).mkdir(parents=True)
            for n in range(6):
                pixels = rng.integers(level, level + 50, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / 'data' / part / name / f'{n}.png')
    return tmp_path / 'data'


def test_training_learns(trained, capsys):
    assert test.main(['test-ppma_digits', str(trained[1]), '--json']) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])['accuracy/top1'] > 60


@pytest.mark.long
@pytest.mark.parametrize('model, least', [('ppma', 97.5), ('mobilevitv2', 95)])
def test_learns_mnist5k(model, least, tmp_path, capsys):
    start = time.process_time()
    train.main([f'test-{model}_mnist5k', '--work-dir', str(tmp_path)])
    assert time.process_time() - start < 1200, 'processor time of 10 minutes on 2 cores'
    assert test.main([f'test-{model}_mnist5k', str(tmp_path / 'last.safetensors'), '--json']) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])['accuracy/top1'] >= least


def test_train_on_a_folder_and_predict(images, tmp_path, capsys):
    small = ['--cfg-options', 'train_dataloader.batch_size=4', 'train_dataloader.num_workers=0',
             'val_dataloader.num_workers=0', 'train_dataloader.dataset.transform.input_size=(3,32,32)',
             'val_dataloader.dataset.transform.input_size=(3,32,32)', 'optim_wrapper.optimizer.lr=2e-3']
    work = tmp_path / 'work'
    train.main(['ppma-tiny_folder', '--data', str(images), '--model', 'test_ppma', '--epochs', '4',
                '--work-dir', str(work), *small])
    capsys.readouterr()
    best = str(work / 'best.safetensors')
    predict.main([best, str(images / 'val' / 'dark'), str(images / 'val' / 'light' / '0.png'), '--json'])
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 7 and {c['name'] for c in rows[0]['classes']} == {'dark', 'light'}
    assert sum(c['probability'] for c in rows[0]['classes']) == pytest.approx(1, abs=1e-5)
    predict.main([best, str(images / 'val' / 'dark')])
    assert 'next likeliest' in capsys.readouterr().out
    predict.main([best, str(images / 'val'), '--json'])          # as the README has it: classes are subfolders
    assert len(json.loads(capsys.readouterr().out)) == 12


def test_configs_load_and_augmentation_never_fails(images):
    from subquad.tools.data.image_sets import ImageFolder
    from subquad.tools.engine.config import known_configs, load
    names = known_configs()
    dense = ('_coco', '_coco-320', '_ade20k-512x512', '_ade20k-640x640', '_cityscapes-1024x1024',
             '_cityscapes-512x1024', '_voc12-coco-512x512', '_shapes', '_in1k', '_in1k-384px',
             '_in1k-multiscale', '_in21k', '_in1k-from-in21k', '_imagenet')
    others = [name for name in names if not name.startswith(('myo_', 'lcsm_', 'mixers_')) and not name.endswith(dense)]
    assert others == [
        'ppma-tiny-crisscross_folder', 'ppma-tiny_finetune-folder', 'ppma-tiny_folder',
        *(f'test-{model}_{data}' for model in ('lcsm', 'mobilevitv2', 'myo') for data in ('digits', 'mnist5k')),
        *(f'test-ppma_{data}' for data in ('digits', 'digits-distilled', 'digits-mesa', 'digits-probe', 'mnist5k'))]
    for model, size in (('ppma', 32), ('mobilevitv2', 64), ('myo', 32), ('lcsm', 32)):
        config = load(f'test-{model}_mnist5k')
        dataset, test = config.train_dataloader.dataset, config.test_dataloader.dataset
        assert config.model.name == f'test_{model}' and dataset.type == test.type == 'MNIST5k'
        assert dataset.transform.scale == (0.7, 1.0) and dataset.transform.mean == test.transform.mean == (0.13,) * 3
        assert dataset.transform.input_size == test.transform.input_size == (3, size, size)
    transform = load('ppma-tiny_folder').train_dataloader.dataset.transform.to_dict()
    data = ImageFolder(str(images / 'train'), {**transform, 'input_size': (3, 32, 32)})
    for n in range(400):                       # rare magnitudes of RandAugment included
        assert data[n % len(data)]['inputs'].shape == (3, 32, 32)


def test_models_and_stats(capsys):
    assert models.main(['ppma', '--json']) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r['name'] for r in rows] == [
        'ppma_tiny', 'ppma_small', 'ppma_base', *(f'ppma_{size}_crisscross' for size in ('tiny', 'small', 'base')),
        'test_ppma']
    assert rows[0]['parameters'] == 14_335_272
    models.main(['test_*', '--json'])
    assert [row['name'] for row in json.loads(capsys.readouterr().out)] == [*FAMILIES]
    stats.main(['subquad_mobilevitv2_100', '--cfg-options', 'width=0.5'])
    assert '1,370,593' in capsys.readouterr().out
    stats.main(['subquad_mobilevitv2_050', 'test_ppma', '--json'])
    assert [row['size'] for row in json.loads(capsys.readouterr().out)] == [[256, 256], [64, 64]]
    stats.main(['ppma_tiny', 'resnet18', '--size', '224x224', '--json'])
    ours, other = json.loads(capsys.readouterr().out)
    assert ours['reported_by_authors']['top1'] == 82.6 and other['reported_by_authors'] == {}
    assert other['macs'] / 1e9 == pytest.approx(1.82, rel=0.01) and other['macs'] == other['macs_without_attention']


@pytest.mark.slow
def test_all_models_are_listed_in_order(capsys):
    models.main(['--json'])
    names = [row['name'] for row in json.loads(capsys.readouterr().out)]
    assert names[5:11] == ['ppma_base_crisscross', 'rmt_tiny', 'rmt_small', 'rmt_base', 'rmt_large',
                           'subquad_mobilevitv2_050']
    assert names[-len(FAMILIES):] == [*FAMILIES] and 'myo_sequence' in names


def test_a_model_of_tokens_is_listed_and_has_no_image_size(capsys):
    models.main(['lcsm_sequence', '--json'])
    rows = json.loads(capsys.readouterr().out)
    assert [(row['name'], row['input_size']) for row in rows] == [('lcsm_sequence', None)]
    models.main(['sequence'])
    lines = capsys.readouterr().out.splitlines()
    assert any('lcsm_sequence' in line and 'tokens' in line for line in lines)
    assert any('myo_sequence' in line and '3x28x28' in line for line in lines)
    command_error(stats.main, ['lcsm_sequence'], r'lcsm_sequence takes tokens (B, T)')


def test_wrong_names():
    command_error(stats.main, ['ppma_tine'], "unknown model 'ppma_tine'", 'ppma_tiny')
    command_error(stats.main, ['ppma_tiny', '--size', '16'], 'H and W >= 32')
    command_error(stats.main, ['subquad_mobilevitv2_100', '--cfg-options', 'width=9'],
                  'width must be a number from 0.25 to 2.5')
    command_error(stats.main, ['ppma_tiny', '--size', '2y4'], "got '2y4'")
    command_error(stats.main, ['ppma_tiny', '--cfg-options', 'mask_mode=logits'],
                  "mask_mode must be one of 'additive', 'multiplicative', got 'logits'")
    command_error(stats.main, ['ppma_tiny', '--cfg-options', 'masks=additive'], 'masks')
    command_error(models.main, ['qqq'], 'no model matches')
    command_error(train.main, ['test-ppma_digit'], 'no config file', 'test-ppma_digits')
    command_error(train.main, ['test-ppma_digits', '--data', 'x'], '--data is not supported')
    command_error(train.main, ['test-ppma_digits', '--epochs', '0'], 'at least 1')


def test_wrong_configs_write_nothing(tmp_path):
    work = tmp_path / 'work'
    base = "_base_ = '{}'\n"
    import subquad.configs
    digits = f'{subquad.configs.__path__[0]}/classification/test-ppma_digits.py'
    cases = [
        ('model = dict(mask_mode="logits")',
         "mask_mode must be one of 'additive', 'multiplicative', got 'logits'"),
        ('model = dict(msk="logit")', 'msk'),
        ('model = dict(name="ppma_tine")', "unknown model 'ppma_tine'"),
        ('model = dict(num_classes=11)', 'the model has 11 classes, the data set 10'),
        ('model = dict(type="TimmClasifier")', 'TimmClasifier'),
        ('train_dataloader = dict(dataset=dict(transform=dict(input_sise=3)))', 'input_sise'),
        ('train_dataloader = dict(dataset=dict(split="training"))', "got 'training'"),
        ('optim_wrapper = dict(optimizer=dict(opt="adamv"))', 'adamv'),
        ('x = = 1', 'config.py'), ('raise ValueError("a\\nb")', 'a b'), ('import sys; sys.exit(3)', 'config.py'),
        ('train_cfg = dict(max_epoch=1)', 'max_epoch'),
        ('train_dataloader = dict(batchsize=4)', 'batchsize'),
        ('train_dataloader = dict(batch_size=2000)', '1437 samples, fewer than batch_size=2000'),
        ('train_dataloader = dict(sampler=dict(shufle=True))', 'shufle'),
        ('param_scheduler = [dict(type="LinearLR", ned=3)]', 'ned'),
        ('train_dataloader = dict(dataset=dict(transform=dict(input_size=(3, 16, 16))))', 'H and W >= 32'),
        ('randomness = dict(sed=3)', 'sed'),
    ]
    for text, message in cases:
        path = tmp_path / 'config.py'
        path.write_text(base.format(digits) + text + '\n')
        # The network itself refuses a size, and a library's class an argument that it does not have.
        kinds = (UserError, ValueError, TypeError)
        command_error(train.main, [path, '--work-dir', work, '--epochs', '1'], message, kind=kinds)
        assert not work.exists(), text
    work.mkdir()
    (work / 'notes.txt').write_text('mine')
    path.write_text(base.format(digits) + 'train_cfg = dict(max_epoch=1)\n')
    command_error(train.main, [path, '--work-dir', work], 'max_epoch', kind=TypeError)
    assert [p.name for p in work.iterdir()] == ['notes.txt']
    command_error(train.main, ['test-ppma_digits', '--cfg-options', 'nonsense.deep=3'], "'nonsense' is no entry")
    command_error(train.main, ['test-ppma_digits', '--seed', '-1'], '--seed must be')
    command_error(train.main, ['~nobody_here/x.py'], 'Could not determine home directory', kind=RuntimeError)
    (tmp_path / 'empty.py').write_text('a = 1\n')
    command_error(train.main, [tmp_path / 'empty.py'], "no 'model' in it")


def test_wrong_folders(tmp_path, images):
    (tmp_path / 'file').write_text('')
    command_error(train.main, ['test-ppma_digits', '--work-dir', tmp_path / 'file' / 'x'], 'cannot write to the folder')
    command_error(train.main, ['ppma-tiny_folder', '--data', tmp_path / 'none'], 'no image folder at')
    (tmp_path / 'empty' / 'train' / 'a').mkdir(parents=True)
    command_error(train.main, ['ppma-tiny_folder', '--data', tmp_path / 'empty'], 'no images in the class subfolders')
    arguments = ['ppma-tiny_folder', '--data', images, '--model', 'test_ppma', '--work-dir', tmp_path / 'w']
    (images / 'val' / 'dark').rename(images / 'val' / 'grey')
    command_error(train.main, arguments, 'different classes: dark, grey not in both')
    (images / 'val' / 'grey').rename(images / 'val' / 'dark')
    for file in (images / 'val' / 'dark').iterdir():
        file.write_text('no image')
    command_error(train.main, arguments, 'no image of the class dark can be read')
    for part in ('train', 'val'):
        (images / part / 'dark').rename(tmp_path / f'{part}_dark')
    command_error(train.main, arguments, 'images of 1 class')
    assert not (tmp_path / 'w').exists()


def test_evaluation_uses_the_options_of_the_checkpoint(tmp_path, monkeypatch):
    """Options that change no shape come from the file; another model or other classes are refused."""
    import timm
    metadata = dict(model='test_ppma', options=dict(num_classes=10, mask_mode='multiplicative'),
                    classes=[str(n) for n in range(10)])
    path = tmp_path / 'w.safetensors'
    model = timm.create_model('test_ppma', num_classes=10)
    save_weights(model, path, metadata)
    seen = []
    original = evaluation.load_state_dict

    def spy(network, *arguments):
        seen.append(network.stages[0].blocks[0].mixer.mask_mode)
        return original(network, *arguments)
    monkeypatch.setattr(evaluation, 'load_state_dict', spy)
    test.main(['test-ppma_digits', str(path), '--json'])
    assert seen == ['multiplicative']
    save_weights(model, path, {**metadata, 'classes': list('abcdefghij')})
    command_error(test.main, ['test-ppma_digits', path], 'was trained on the classes a, b, c')
    save_weights(model, path, {**metadata, 'model': 'ppma_tiny'})
    command_error(test.main, ['test-ppma_digits', path], 'was trained as ppma_tiny, but the config builds test_ppma')


def test_wrong_predictions(trained, tmp_path, images):
    weights = trained[1]
    command_error(predict.main, [weights, tmp_path / 'none.png'], 'no file or folder')
    (tmp_path / 'empty').mkdir()
    command_error(predict.main, [weights, tmp_path / 'empty'], 'no images in the folder')
    (tmp_path / 'text.png').write_text('no image')
    command_error(predict.main, [weights, tmp_path / 'text.png'], 'text.png is not an image')
    image = images / 'val' / 'dark' / '0.png'
    command_error(predict.main, [tmp_path / 'none.pth', image], 'no weight file')
    command_error(predict.main, [weights, image, '--topk', '0'], '--topk must be at least 1')
    command_error(predict.main, [weights, image, '--model', 'ppma_tiny'],
                  'not a checkpoint of this ppma_tiny', 'shapes')
    predict.main([str(trained[0] / 'epoch_2.pth'), str(image), '--model', 'test_ppma'])      # of the Runner: harmless
    shutil.copy(weights, tmp_path / 'last.safetensors')
    torch.save({'model': print}, tmp_path / 'foreign.pth')
    command_error(predict.main, [tmp_path / 'foreign.pth', image, '--model', 'test_ppma'], 'could run code',
                  'last.safetensors')
    import timm
    save_weights(timm.create_model('test_ppma'), tmp_path / 'plain.safetensors')
    command_error(predict.main, [tmp_path / 'plain.safetensors', image], 'give --model NAME')
    predict.main([str(tmp_path / 'plain.safetensors'), str(image), '--model', 'test_ppma'])
    command_error(test.main, ['test-ppma_digits', tmp_path / 'plain.safetensors'], 'not a checkpoint of this test_ppma')


def test_command_line(capsys):
    for arguments, code, text in ((['--help'], 0, 'models and weights:'), ([], 0, 'models and weights:'),
                                  (['--version'], 0, '.'),
                                  (['modles'], 2, 'did you mean models'), (['models', 'test_*'], 0, 'test_ppma'),
                                  (['stats', 'nothing'], 2, 'error: unknown model')):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        output = capsys.readouterr()
        assert caught.value.code == code and text in output.out + output.err
    for name in cli.TOOLS:
        with pytest.raises(SystemExit) as caught:
            cli.main([name, '--help'])
        assert caught.value.code == 0 and 'usage' in capsys.readouterr().out


@pytest.mark.long
def test_demo_reaches_97_percent(tmp_path, capsys):
    shipped, trained = _demo_accuracies(capsys, '--out', str(tmp_path))
    assert shipped >= 97 and trained >= 97
    assert (tmp_path / 'trained.png').stat().st_size > 10_000
    assert {path.name for path in tmp_path.iterdir()} == {'digits.png', 'panels.png', 'trained.png', 'images', 'train'}


def test_pretrained_demo_reaches_97_percent_without_training(tmp_path, capsys):
    accuracy, = _demo_accuracies(capsys, '--out', str(tmp_path), '--pretrained')
    assert accuracy >= 97
    assert {path.name for path in tmp_path.iterdir()} == {'digits.png', 'panels.png', 'images'}
    assert min((tmp_path / name).stat().st_size for name in ('digits.png', 'panels.png')) > 10_000


def test_demo_shows_the_network_of_the_package_before_it_trains(tmp_path, monkeypatch):
    from subquad.tools import demo
    from subquad.tools.engine.training import run as training
    done = []
    monkeypatch.setattr(demo, '_test_and_draw', lambda config, weights, files, picture, how: done.append(weights))
    monkeypatch.setattr(demo, '_draw_panels', lambda files, picture: done.append(picture.name))
    monkeypatch.setattr(training, 'run_training', lambda config, folder: done.append(folder) or 'new')
    demo.main(['--out', str(tmp_path)])
    assert done == ['test_ppma.digits', 'panels.png', str(tmp_path / 'train'), 'new']


def _demo_accuracies(capsys, *options):
    from subquad.tools import demo
    demo.main(list(options))
    found = re.findall(r'Accuracy on 360 test images: (.*) % \(linear classifier: (.*) %\)', capsys.readouterr().out)
    assert all(linear == '96.7' for _, linear in found)
    return [float(accuracy) for accuracy, _ in found]
