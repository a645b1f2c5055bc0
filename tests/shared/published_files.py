"""Published weights for tests that must not use a network: files that stand for downloads, and small table entries."""
from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.registry import WEIGHTS, PublishedWeights


def serve(monkeypatch, files):
    """Answer downloads of these names (name -> path). Return a list that receives the name of each download.

    A cache folder is added to the name: 'NAME in FOLDER'.
    """
    asked = []

    def fetch(weights, cache_dir=None):
        asked.append(f'{weights.name} in {cache_dir}' if cache_dir else weights.name)
        if weights.name not in files:
            raise WeightsError(f'{weights.name} cannot be downloaded')
        return files[weights.name]
    monkeypatch.setattr('subquad.backbones.weights.resolve.fetch', fetch)
    return asked


def publish(monkeypatch, name, **entries):
    """Add weights to the table of published weights, by default those of a small classifier of PPMA."""
    arch, tag = name.split('.')
    entries = {**dict(task='classification', format='ppma', url=f'https://example.org/{name}.pth',
                      input_size=(3, 64, 64), crop_pct=1.0), **entries}
    monkeypatch.setitem(WEIGHTS, name, PublishedWeights(arch, tag, **entries))
