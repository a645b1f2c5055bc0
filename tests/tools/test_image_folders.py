"""Image folders as data sets: the cost of their index, and images that cannot be read."""
from types import SimpleNamespace

import timm.data

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
