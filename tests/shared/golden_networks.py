"""What families of published networks share: golden files, state dicts, and the tests of them."""
import argparse
import functools
import json
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import timm
import torch
from helpers import DATA, assert_close, relative_error
from pairwise import slow
from safetensors import safe_open

from subquad import kernels
from subquad.backbones.weights import WeightsError, load_weights, read_file
from subquad.backbones.weights.convert import convert, published_format
from subquad.tools.engine.counting.counts import count


def part(tensors, prefix):
    """The entries below a prefix."""
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def load_golden(name, build, **options):
    """Return the tensors of a golden file, and its network, which `build` makes of its config."""
    with safe_open(DATA / f'{name}.safetensors', 'pt') as file:
        golden = {key: file.get_tensor(key) for key in file.keys()}
        model = build(json.loads(file.metadata()['config']), **options).eval()
    model.load_state_dict(part(golden, 'state/'))
    return golden, model


def logits_error(golden, model):
    """The relative error of a network's logits, for tests that change a part of it."""
    with torch.no_grad():
        return relative_error(model(golden['input']), golden['logits'])


def randomize(model):
    """Give every weight a random value, also statistics."""
    for value in model.state_dict().values():
        value.normal_() if value.is_floating_point() else value.fill_(7)
    return model


def assert_same(found, expected, computed=None):
    """Assert that two state dicts are bit-equal, but for buffers with this word in their names.

    The package computes them itself, maybe for larger images.
    """
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if computed and computed in key:
            assert_close(found[key][tuple(map(slice, value.shape))], value, 1e-6, key)
        else:
            assert torch.equal(found[key], value), key


def shapes(state):
    return {key: tuple(value.shape) for key, value in state.items()}


@functools.lru_cache(None)
def on_meta(name, **options):
    """A model without values, which tests share: PyTorch takes long to initialize it."""
    return timm.create_model(name, device='meta', **options)


def _with_prefix(prefix, state):
    return {f'{prefix}{key}': value for key, value in state.items()}


# What the programs of authors and others store: (state dict, config) -> content of the file.
CONTAINERS = {
    'bare': lambda state, config: state,
    'model': lambda state, config: {'model': state, 'args': argparse.Namespace(lr=1e-3)},
    'training': lambda state, config: {
        'model': state, 'optimizer': {'state': {}, 'param_groups': [{'lr': 1e-3}]}, 'scaler': {},
        'lr_scheduler': {'t_in_epochs': False}, 'max_accuracy': 83.5, 'config': config},
    'distributed': lambda state, config: {'model': _with_prefix('module.', state)},
    'timm': lambda state, config: {'state_dict': _with_prefix('module.', state), 'epoch': 309,
                                   'args': argparse.Namespace(lr=5e-3)},
    'averaged': lambda state, config: {'model_ema': state},
    'detector': lambda state, config: {'state_dict': _with_prefix('backbone.', state), 'meta': {}},
}


class PublishedNetwork:
    """The tests of a family. A class TestPublishedNetwork in the family's file inherits them."""
    family: str
    parameters: dict                    # model -> number
    gmacs: dict                         # model -> number, see `macs`
    gradients = 5e-5                    # tolerance
    counted = None                      # models whose MACs are counted by default: the first
    backends = ('auto', 'portable', 'reference', 'export')
    keys = {}                           # model -> number of the keys in its file
    complete = dict(output_norms=True)  # options with which a model has all named weights
    variants = ({},)                    # options of small networks
    reported = (({}, 'raw'),)           # options, and the copy that is read of a file with two
    averaged = 'model_ema'              # where a file has the averaged copy
    missing: dict                       # authors' key -> our key that is missing without it
    containers = {}                     # of this family's authors only
    computed = '-'                      # see `assert_same`

    def build(self, config, **options):
        """The network of a golden file's config."""
        raise NotImplementedError

    def authors_state(self, model):
        """The state dict of a model as its authors' file has it, not by this package's key map."""
        raise NotImplementedError

    def published(self, name, model):
        """The names and shapes in the file of a model on the meta device."""
        with torch.device('meta'):
            return self.authors_state(model)

    def macs(self, name, row):
        return row['macs']

    def intermediates(self, golden, model, image):
        """Pairs of an intermediate result and its golden value."""
        stages = model.forward_intermediates(image, intermediates_only=True)
        normed = model.forward_intermediates(image, norm=True, intermediates_only=True)
        return [(y, golden[key]) for n in range(4) for y, key in (
            (stages[n], f'stage{n + 1}'), (normed[n], f'outnorm{n}'))]

    def small(self, **options):
        return timm.create_model(f'test_{self.family}', **options)

    def pytest_generate_tests(self, metafunc):
        files = sorted(path.stem for path in DATA.glob(f'{self.family}_*.safetensors'))
        counted = self.counted or list(self.gmacs)[:1]
        others = slow(*(name for name in self.gmacs if name not in counted))
        for argument, values in dict(
                golden=files, backend=self.backends, name=[*self.parameters, f'test_{self.family}'],
                counted=[*counted, *others], options=self.variants, reported=self.reported).items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values, ids=str)

    @pytest.fixture
    def config(self, monkeypatch):
        """What yacs, which need not be installed, stores in the files of training scripts."""
        node = type('CfgNode', (dict,), {'__module__': 'yacs.config'})
        monkeypatch.setitem(sys.modules, 'yacs', ModuleType('yacs'))
        monkeypatch.setitem(sys.modules, 'yacs.config', SimpleNamespace(CfgNode=node))
        config = node(MODEL=node(NAME='tiny', DROP_PATH_RATE=0.2), BASE=[''])
        vars(config).update(__immutable__=True, __deprecated_keys__=set())
        return config

    def test_parameters_and_macs_equal_the_published_ones(self, counted):
        row = count(counted, 224, 224)
        assert row['parameters'] == self.parameters[counted]
        assert self.macs(counted, row) / 1e9 == pytest.approx(self.gmacs[counted], rel=0.01)

    def test_outputs_and_gradients_equal_those_of_the_published_network(self, golden, backend):
        golden, model = load_golden(golden, self.build)
        image = golden['input'].requires_grad_()
        with kernels.use_backend(backend):
            pairs = self.intermediates(golden, model, image)
            logits = model(image)
            (logits * golden['cotangent']).sum().backward()
            assert logits_error(golden, model) <= 2e-5, 'without gradients'
        for n, (found, expected) in enumerate([*pairs, (logits, golden['logits'])]):
            assert_close(found, expected, 2e-5, f'result {n}')
        gradients = part(golden, 'grad/')
        assert_close(image.grad, gradients.pop('input'), self.gradients, 'input')
        found = {key: x.grad for key, x in model.named_parameters() if 'output_norms' not in key}
        expected = model.translate_checkpoint(gradients)
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_close(value, expected[key], self.gradients, key)

    def test_every_key_has_one_published_name(self, name):
        model = on_meta(name, **self.complete)
        state, theirs = model.state_dict(), self.published(name, model)
        assert shapes(model.published_state(state)) == shapes(theirs)
        assert shapes(model.translate_checkpoint(theirs)) == shapes(state)
        own = [key for key in state if 'output_norms' not in key and 'aux_fc' not in key]
        assert len(own) == self.keys.get(name, len(own))
        sizes = {key: value.numel() for key, value in model.named_parameters()}
        number = sum(sizes.get(key, 0) for key in own)
        assert number == self.parameters.get(name, number)

    def test_golden_names_come_back(self, golden):
        golden, model = load_golden(golden, self.build)
        theirs = part(golden, 'state/')
        back = model.published_state(model.translate_checkpoint(theirs))
        assert_same(back, theirs, self.computed)
        written = self.authors_state(model)                  # also counters, which the files lack
        assert_same({key: written[key] for key in theirs}, theirs, self.computed)

    def test_published_files_load_strictly(self, options, config, tmp_path):
        """From all containers, and without a warning."""
        options = dict(num_classes=5, **options)
        model, loaded = randomize(self.small(**options)), self.small(**options)
        state = self.authors_state(model)
        for container, wrap in {**CONTAINERS, **self.containers}.items():
            path = tmp_path / f'{container}.pth'
            torch.save(wrap(state, config), path)
            for value in loaded.state_dict().values():
                value.zero_()
            with warnings.catch_warnings():
                warnings.simplefilter('error')
                load_weights(loaded, path)
            assert_same(loaded.state_dict(), model.state_dict())
            for theirs, ours in self.missing.items():
                less = {key: value for key, value in state.items() if key != theirs}
                torch.save(wrap(less, config), path)
                with pytest.raises(WeightsError, match=f'{container}.*1 keys missing .{ours}'):
                    load_weights(loaded, path)

    def test_the_copy_that_the_authors_report_is_read(self, reported, tmp_path):
        options, copy = reported
        models = {kind: randomize(self.small(**options)) for kind in ('raw', 'averaged')}
        states = {kind: self.authors_state(model) for kind, model in models.items()}
        path, loaded = tmp_path / 'best.pth', self.small(**options)
        torch.save({'model': states['raw'], self.averaged: states['averaged']}, path)
        for choice, read in ((None, copy), ('raw', 'raw'), ('averaged', 'averaged')):
            with pytest.warns(UserWarning, match=f'its {read} weights .* are read'):
                load_weights(loaded, path, weights=choice)
            assert_same(loaded.state_dict(), models[read].state_dict())
        done = convert(path, tmp_path / 'ours.safetensors', loaded)
        assert done.metadata['provenance']['weights'] == copy
        assert any(f'its {copy} weights' in note for note in done.notes)
        assert_same(done.weights, models[copy].state_dict())

    @pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
    def test_files_convert_both_ways(self, dtype, tmp_path):
        model = randomize(self.small(num_classes=5, **self.complete)).to(dtype)
        state = {key: value.to(dtype) if self.computed in key else value
                 for key, value in self.authors_state(model).items()}
        torch.save({'model': state}, tmp_path / 'theirs.pth')
        assert published_format(state) == self.family
        ours = convert(tmp_path / 'theirs.pth', tmp_path / 'ours.safetensors', model)
        assert ours.metadata['provenance']['format'] == self.family
        assert_same(read_file(tmp_path / 'ours.safetensors').weights, model.state_dict())
        convert(tmp_path / 'ours.safetensors', tmp_path / 'back.pth', model, to=self.family)
        back = torch.load(tmp_path / 'back.pth', weights_only=True)['model']
        assert published_format(back) == self.family
        assert_same(back, self.authors_state(model), self.computed)
