"""Commands take the name of published weights in place of a file: predict, test, train and visualize."""
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from ppma_files import authors_state, save_authors_file
from published_files import publish, serve
from training_cases import fails, folder_arguments, make_images
from user_errors import command_error

from subquad.tools import predict, test, visualize
from subquad.tools.common.cli import UserError
from subquad.tools.engine.classification.weight_files import classifier_from_file

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)


@pytest.fixture
def image(tmp_path):
    path = tmp_path / 'image.png'
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 90, 3), dtype=np.uint8)).save(path)
    return str(path)


@pytest.fixture
def average(tmp_path, monkeypatch):
    """The average in the file of test_ppma.small, a published classifier of ImageNet's classes."""
    torch.manual_seed(2)
    raw, average = timm.create_model('test_ppma'), timm.create_model('test_ppma').eval()
    save_authors_file(raw, tmp_path / 'best.pth', average)
    publish(monkeypatch, 'test_ppma.small', mean=MEAN, std=STD, crop_pct=0.9)
    serve(monkeypatch, {'test_ppma.small': tmp_path / 'best.pth'})
    return average


@pytest.mark.parametrize('name', ['test_ppma.small', 'subquad://test_ppma.small'])
def test_predict_knows_model_preprocessing_and_classes_of_published_weights(name, average, image, capsys):
    assert predict.main([name, image, '--json', '--topk', '3']) == 0
    out, said = capsys.readouterr()
    found = json.loads(out)[0]['classes']
    transform = timm.data.create_transform((3, 64, 64), mean=MEAN, std=STD, crop_pct=0.9, interpolation='bicubic')
    with torch.no_grad():
        top = average(transform(Image.open(image))[None]).softmax(1)[0].topk(3)
    names = timm.data.ImageNetInfo().label_descriptions()
    assert [item['name'] for item in found] == [names[index] for index in top.indices]
    assert [item['probability'] for item in found] == pytest.approx(top.values.tolist(), rel=1e-3)
    assert said == f'{name}: its averaged weights (model_ema) are read, not the raw ones (model)\n'


def test_metadata_of_a_published_file_come_before_the_table(average, tmp_path, monkeypatch):
    from subquad.backbones.weights import save_weights
    trained = timm.create_model('test_ppma', num_classes=3, mask_mode='multiplicative')
    save_weights(trained, tmp_path / 'own.safetensors', dict(
        model='test_ppma', options=dict(num_classes=3, mask_mode='multiplicative'), classes=['a', 'b', 'c']))
    publish(monkeypatch, 'test_ppma.own', format='subquad', num_classes=3)
    serve(monkeypatch, {'test_ppma.own': tmp_path / 'own.safetensors', 'test_ppma.small': tmp_path / 'best.pth'})
    model, _, classes = classifier_from_file('test_ppma.own')
    assert classes == ['a', 'b', 'c'] and model.stages[0].blocks[0].mixer.mask_mode == 'multiplicative'
    with pytest.raises(UserError, match='test_ppma.small is not a checkpoint of this test_mobilevitv2'):
        classifier_from_file('test_ppma.small', 'test_mobilevitv2')


def test_unknown_published_weights_end_predict_with_one_sentence(average, image, monkeypatch):
    assert 'there are no weights test_ppma.smal; test_ppma has ' in command_error(
        predict.main, ['test_ppma.smal', image])
    assert 'did you mean ppma_tiny.in1k' in command_error(predict.main, ['ppma_tinny.in1k', image])
    serve(monkeypatch, {})
    assert command_error(predict.main, ['test_ppma.small', image]) == 'test_ppma.small cannot be downloaded'
    publish(monkeypatch, 'test_ppma.shapes', task='detection', config='mask-rcnn_test-ppma_shapes')
    assert 'are weights for detection, but a classifier is needed' in command_error(
        visualize.main, ['test_ppma.shapes', image])


@pytest.mark.parametrize('name', ['test_ppma', 'test_mobilevitv2'])
def test_authors_files_with_any_number_of_classes(name, tmp_path):
    model = timm.create_model(name, num_classes=37)
    if name == 'test_ppma':
        state = authors_state(model)
    else:
        from cvnets_files import authors_file, encoder_entries
        encoder = authors_file(encoder_entries(0.5))
        state = {key.removeprefix('encoder.'): value for key, value in encoder.items()}
        state |= {'classifier.1.weight': torch.randn(37, 256), 'classifier.1.bias': torch.randn(37)}
        name = 'subquad_mobilevitv2_050'
    torch.save({'model': state}, tmp_path / 'w.pth')
    loaded, _, classes = classifier_from_file(str(tmp_path / 'w.pth'), name)
    assert loaded.num_classes == len(classes) == 37
    theirs = state['head.weight' if name == 'test_ppma' else 'classifier.1.weight']
    assert torch.equal(loaded.head.fc.weight, theirs)


def test_test_takes_published_weights(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    model = timm.create_model('test_ppma', num_classes=10)
    save_authors_file(timm.create_model('test_ppma', num_classes=10), tmp_path / 'best.pth', model)
    torch.save(model.state_dict(), tmp_path / 'average.pth')
    publish(monkeypatch, 'test_ppma.ten', num_classes=10, input_size=(3, 32, 32), mean=(0.3,) * 3, std=(0.4,) * 3,
            interpolation='bilinear')                    # as the config, which the file without a transform takes
    serve(monkeypatch, {'test_ppma.ten': tmp_path / 'best.pth'})
    results = []
    for name in ('test_ppma.ten', str(tmp_path / 'average.pth')):
        assert test.main(['test-ppma_digits', name, '--json']) == 0
        out, said = capsys.readouterr()
        results.append(json.loads(out))
        assert ('test_ppma.ten: its averaged weights (model_ema) are read' in said) == (name == 'test_ppma.ten')
    assert results[0] == results[1]
    assert 'there are no weights test_ppma.eleven' in command_error(test.main, ['test-ppma_digits', 'test_ppma.eleven'])


def test_training_starts_from_published_weights(average, tmp_path, monkeypatch, capsys):
    from mmengine.runner import EpochBasedTrainLoop
    seen = {}

    def stop(loop, *_):
        seen.update({key: value.clone() for key, value in loop.runner.model.net.state_dict().items()})
        raise UserError('enough')
    monkeypatch.setattr(EpochBasedTrainLoop, 'run_iter', stop)
    arguments = folder_arguments(make_images(tmp_path / 'data'), tmp_path / 'work')
    for words in (['--weights', 'test_ppma.small'], ['load_from=subquad://test_ppma.small']):
        seen.clear()
        fails([*arguments, *words], 'enough')
        body = {key: value for key, value in average.state_dict().items() if not key.startswith('head.fc.')}
        assert all(torch.equal(seen[key], value) for key, value in body.items())
        said = capsys.readouterr().err
        assert 'test_ppma.small: its averaged weights (model_ema) are read' in said
        assert 'test_ppma.small has 1000 classes, the data 2: the classifier' in said
    fails([*arguments, '--weights', ''], '--weights: the name of the weights is empty')
    fails([*arguments, '--weights', 'test_ppma.smal'], 'there are no weights test_ppma.smal')


def test_visualize_takes_published_weights(average, image, tmp_path, capsys):
    assert visualize.main(['test_ppma.small', image, '--out', str(tmp_path / 'decay.png')]) == 0
    assert (tmp_path / 'decay.png').stat().st_size > 1000
