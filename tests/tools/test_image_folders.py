"""Image folders as data sets: the cost of their index, and images that cannot be read."""
import json
from types import SimpleNamespace

import timm
import timm.data
import torch
from training_cases import folder_arguments, make_images

from subquad.backbones.weights import save_weights
from subquad.tools import test, train
from subquad.tools.data import image_sets
from subquad.tools.data.image_sets import ImageFolder


class _Label(int):
    """A label that counts how often it is hashed."""
    hashed = 0

    def __hash__(self):
        _Label.hashed += 1
        return int.__hash__(self)


def test_the_index_of_a_folder_looks_at_each_image_once(tmp_path, monkeypatch):
    """Neither classes x images comparisons, nor a header for each of many images."""
    samples = [(f'{tmp_path}/{label:04d}/{n}.png', _Label(label)) for label in range(200) for n in range(40)]
    reader = SimpleNamespace(class_to_idx={f'{label:04d}': label for label in range(200)}, samples=samples)
    monkeypatch.setattr(timm.data, 'ImageDataset', lambda root: SimpleNamespace(reader=reader))
    headers = []
    monkeypatch.setattr(image_sets, 'check_header', headers.append)
    _Label.hashed = 0
    assert ImageFolder(str(tmp_path)).samples == samples
    assert _Label.hashed == len(samples) and len(headers) == image_sets.CHECKED <= 5_000


def _damaged(tmp_path):
    """The images of `make_images`; the first dark one to validate on has lost its end."""
    data = make_images(tmp_path / 'data')
    file = data / 'val' / 'dark' / '0.png'
    file.write_bytes(file.read_bytes()[:-200])
    return data, file


def test_images_that_cannot_be_read_are_left_out_of_the_metrics(tmp_path, capsys):
    data, file = _damaged(tmp_path)
    torch.manual_seed(0)
    model = timm.create_model('test_ppma', num_classes=2)
    with torch.no_grad():                                        # whatever the image, it is light
        model.head.fc.weight.zero_()
        model.head.fc.bias.copy_(torch.tensor([0., 1.]))
    save_weights(model, tmp_path / 'w.safetensors', dict(model='test_ppma', options=dict(num_classes=2),
                                                         classes=['dark', 'light']))
    arguments = ['ppma-tiny_folder', str(tmp_path / 'w.safetensors'), '--data', str(data), '--model', 'test_ppma']
    options = ['--cfg-options', 'test_dataloader.num_workers=0', 'test_dataloader.batch_size=3']
    assert test.main([*arguments, '--report', '--json', *options]) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert abs(found['accuracy/top1'] - 400 / 7) < 1e-4, 'four of seven images, not of eight'
    assert {row['name']: row['count'] for row in found['report']['classes']} == {'dark': 3, 'light': 4}
    assert output.err.count(f'left out: {file} is not an image that can be read') == 1
    assert '1 image could not be read; see above' in output.err


def test_training_names_an_image_that_validation_leaves_out_once(tmp_path, capsys):
    data, file = _damaged(tmp_path)
    assert train.main(folder_arguments(data, tmp_path / 'run', epochs=2)) == 0
    error = capsys.readouterr().err
    assert error.count(f'left out: {file} is not') == 1 and 'is used instead' not in error
