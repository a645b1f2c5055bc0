"""Images to train on, and weights, images and replaced output of the tests of subquad visualize."""
import pytest
import timm
import torch
from PIL import Image

from subquad.backbones.weights import save_weights


@pytest.fixture(scope='session')
def images(tmp_path_factory):
    """Images in folders of two classes, which tests leave as they are."""
    from training_cases import make_images
    return make_images(tmp_path_factory.mktemp('data'))


@pytest.fixture(scope='session')
def made(tmp_path_factory):
    """A folder with weights and images."""
    torch.manual_seed(0)
    tmp_path = tmp_path_factory.mktemp('made')
    for name, options, file in (('test_mobilevitv2', dict(num_latent_tokens=2), ''), ('test_ppma', {}, ''),
                                ('test_ppma', dict(mask_mode='multiplicative'), 'multiplicative'),
                                ('test_myo', {}, ''), ('test_ppma', dict(paths='none'), 'plain'),
                                ('test_ppma', dict(attention_share=0.5), 'hybrid'),
                                ('test_myo', dict(parametrization='skew'), 'skew'),
                                ('test_resnet', {}, ''), ('test_lcsm', {}, ''),
                                ('test_lcsm', dict(mixer='retnet'), 'retnet'),
                                ('test_lcsm', dict(mixer='deltanet'), 'deltanet')):
        model = timm.create_model(name, num_classes=3, **options)
        save_weights(model, tmp_path / f'{file or name}.safetensors',
                     dict(model=name, options=dict(num_classes=3, **options), classes=['a', 'b', 'c'],
                          transform=dict(input_size=(3, 64, 96), crop_pct=1.0)))
    (tmp_path / 'images').mkdir()
    for n in range(3):
        image = Image.new('RGB', (100, 70), (80 * n, 20, 120))
        image.paste((200, 200, 10), (20, 10, 50, 40))
        image.save(tmp_path / 'images' / f'{n}.png')
    return tmp_path


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """The current folder, with links to the weights and images."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def drawn(monkeypatch):
    """The pictures that are drawn, instead of files."""
    found = []
    monkeypatch.setattr('subquad.tools.engine.drawing.visualization.draw',
                        lambda pictures, title: found.extend([*pictures, title]))
    monkeypatch.setattr('subquad.tools.engine.drawing.visualization.save', lambda page, path, dpi: None)
    return found


@pytest.fixture
def paged(monkeypatch):
    """The viewers and titles of pages, instead of files."""
    found = []
    monkeypatch.setattr('subquad.tools.engine.drawing.visualization.write_page',
                        lambda path, drawn, viewers, title, dpi: found.extend([viewers, title]))
    return found
