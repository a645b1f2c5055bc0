"""ExecuTorch files: their outputs, what XNNPACK runs of them, metadata, and refusals."""
import contextlib
import copy
import dataclasses
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subquad.tools.common.cli import UserError
from subquad.tools.exporters.formats import Options
from subquad.tools.exporters.pipeline import compare, inputs_for
from subquad.tools.exporters.subject import Subject, classifier_subject, describe, random_classifier

pytest.importorskip('executorch')
executorch = pytest.importorskip('subquad.tools.exporters.to_executorch')
fold_constants = pytest.importorskip('subquad.tools.exporters.xnnpack_forms').fold_constants
MODELS = ('subquad_mobilevitv2_050', 'test_mobilevitv2', 'test_ppma', 'ppma_tiny', 'test_rmt', 'test_mambavision',
          'test_myo', 'myo_tiny')


class Small(nn.Module):
    """A layer of each kind that XNNPACK lacks: norms, softmax of rank 4, sums, splits, pooling and upsampling."""

    def __init__(self):
        super().__init__()
        self.conv, self.point = nn.Conv2d(3, 17, 3, 2, 1), nn.Conv2d(8, 8, 1)
        self.group_norm, self.layer_norm = nn.GroupNorm(1, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        query, key, value = self.conv(images).split([1, 8, 8], 1)
        context = (key * query.flatten(2)[:, :, None].softmax(-1).reshape(query.shape)).sum(-1, keepdim=True)
        y = self.group_norm(F.silu(value) * context) + query.softmax(-1)
        y = self.point(y) + F.interpolate(F.avg_pool2d(y, 2), scale_factor=2., mode='nearest')
        tokens = F.gelu(self.layer_norm(y.permute(0, 2, 3, 1)))
        decay = F.softplus(tokens.mean(-1)).cumsum(-1)[..., None]
        return self.head((tokens / (1 + decay)).permute(0, 3, 1, 2).mean((2, 3))), y


def randomized(model):
    """Give all norms random weights and statistics."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor.is_floating_point():
                    offset = -0.5 if name in ('bias', 'running_mean') else 0.5
                    tensor.data = torch.rand(tensor.shape, generator=generator) + offset
    return model


def small_subject(dynamic=()):
    torch.manual_seed(0)
    model = randomized(Small().eval())
    transform = dict(resize=None, crop=[16, 24], scale=1 / 255, mean=[0.] * 3, std=[1.] * 3, normalize_in_graph=False)
    labels = ['zéro', '一', 'zwei', '3', '4']
    metadata = describe('small', 'classification', 'random', (1, 3, 16, 24), transform, labels)
    metadata['input']['dynamic'] = list(dynamic)
    return Subject('small', 'classification', copy.deepcopy(model), model, (16, 24), 3, ('logits', 'map'), metadata,
                   'sizes are fixed')


def model_subject(name, features=False, size=64):
    read = random_classifier(name, (size, size))
    randomized(read.model)
    return classifier_subject(read, 'random', (size, size), features)


def converted(subject, options, folder):
    path = folder / f'{subject.name}.pte'
    return path, executorch.convert(subject, options, path)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    """(file, conversion, subject) with a dynamic batch."""
    subject = small_subject(['batch'])
    path, conversion = converted(subject, Options(dynamic=frozenset(['batch'])), tmp_path_factory.mktemp('small'))
    return path, conversion, subject


@contextlib.contextmanager
def _printing_to(file):
    """Send what this process writes, from C++ too, to a file."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with open(file, 'wb') as target:
        try:
            for descriptor in (1, 2):
                os.dup2(target.fileno(), descriptor)
            yield
        finally:
            for descriptor, before in zip((1, 2), kept):
                os.dup2(before, descriptor)
                os.close(before)


@pytest.fixture(scope='module')
def fixed(tmp_path_factory):
    """(file, conversion, subject) with fixed shapes; what the conversion printed is in the file `printed` beside it."""
    subject, folder = small_subject(), tmp_path_factory.mktemp('fixed')
    with _printing_to(folder / 'printed'):
        path, conversion = converted(subject, Options(), folder)
    return path, conversion, subject


def test_outputs_and_delegation(fixed):
    path, conversion, subject = fixed
    assert compare(executorch.load(path), subject, inputs_for(subject, Options())).relative < 1e-5
    assert (conversion.operators, conversion.delegates, conversion.delegated_macs) == ({}, 1, 1.0)


def test_a_dynamic_batch(small):
    path, conversion, subject = small
    run = executorch.load(path)
    assert compare(run, subject, inputs_for(subject, Options(dynamic=frozenset(['batch'])))).relative < 1e-5
    assert run(subject.example(64))[0].shape == (64, 5)
    assert conversion.delegated_macs > 0.9
    with pytest.raises(UserError, match=r'cannot run .* \(65, 3, 16, 24\)'):
        run(subject.example(65))


@pytest.mark.slow
def test_half_precision(tmp_path):
    subject = small_subject()
    path, conversion = converted(subject, Options('fp16'), tmp_path)
    run = executorch.load(path)
    assert 1e-5 < compare(run, subject, inputs_for(subject, Options())).relative < 1e-2     # float16 rounds
    assert [y.dtype for y in run(subject.example())] == [torch.float32] * 2
    assert conversion.delegates == 1 and conversion.delegated_macs == 1.0


def test_the_runtime_alone_reads_the_metadata(fixed, python):
    result = python('import json, sys\nfrom executorch.runtime import Runtime\n'
                    f'program = Runtime.get().load_program({str(fixed[0])!r})\n'
                    'method = program.load_method("metadata")\n'
                    'print(ascii(json.loads(method.execute(())[0])["labels"]))')
    assert result.stdout.strip() == ascii(['zéro', '一', 'zwei', '3', '4']), result.stderr
    assert executorch.read_metadata(fixed[0]) == fixed[2].metadata


def test_outputs_outlive_the_next_run_and_other_thread_counts(fixed):
    path, _, subject = fixed
    first, second = executorch.load(path, 1), executorch.load(path, 2)
    images = subject.example(seed=0), subject.example(seed=2)
    kept = first(images[0])[0]
    before = kept.clone()
    for _ in range(3):
        assert torch.allclose(second(images[0])[0], before, atol=1e-6)
        first(images[1])
    assert torch.equal(kept, before) and not torch.equal(first(images[1])[0], before)


@pytest.mark.parametrize('images', [
    torch.zeros(1, 3, 16, 25), torch.zeros(2, 3, 16, 24), torch.zeros(1, 1, 16, 24), torch.zeros(3, 16, 24),
    torch.zeros(0, 3, 16, 24), torch.zeros(1, 3, 16, 24, dtype=torch.float64), torch.zeros(1, 3, 32, 12)])
def test_images_of_another_shape_are_refused(fixed, images):
    with pytest.raises(UserError, match='ExecuTorch cannot run'):
        executorch.load(fixed[0])(images)


def test_channels_last_images(fixed):
    path, _, subject = fixed
    run, images = executorch.load(path), subject.example()
    assert torch.equal(run(images.contiguous(memory_format=torch.channels_last))[0], run(images)[0])


def test_files_that_are_no_program(fixed, tmp_path):
    content = fixed[0].read_bytes()
    for name, data in {'empty': b'', 'text': b'x' * 4096, 'short': content[:200], 'cut': content[:len(content) // 3],
                       'zeros': content[:64] + bytes(len(content) - 64)}.items():
        path = tmp_path / f'{name}.pte'
        path.write_bytes(data)
        for read in (executorch.load, executorch.read_metadata):
            with pytest.raises(UserError, match=name):
                read(path)
    with pytest.raises(UserError, match='cannot read'):
        executorch.load(tmp_path / 'missing.pte')


def test_conversion_and_runs_print_nothing(fixed, capfd):
    path, _, subject = fixed
    assert (path.parent / 'printed').read_text() == ''
    for threads in (2, 1):
        executorch.load(path, threads)(subject.example())
    executorch.read_metadata(path)
    assert tuple(capfd.readouterr()) == ('', '')


class Grid(nn.Module):
    """Arithmetic on 4 dimensions, and a reshape to 5 that no form removes."""

    def forward(self, images):
        return (images.reshape(1, 3, 4, 4, 24).permute(0, 1, 3, 2, 4).reshape(1, 3, 16, 24).relu(),)


def test_tensors_of_five_dimensions_are_refused(tmp_path):
    subject = dataclasses.replace(small_subject(), module=Grid())
    with pytest.raises(UserError, match='a tensor of 5 dimensions; ExecuTorch files here have at most 4'):
        converted(subject, Options(), tmp_path)
    assert not list(tmp_path.iterdir())


class Computed(nn.Module):
    """A weight and a bias that are computed from parameters."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 24)), nn.Parameter(torch.randn(5))

    def forward(self, images):
        return F.linear(images, self.weight + 1, self.bias.exp())


def test_computed_constants_have_names_that_no_later_pass_gives():
    module = Computed()
    program = fold_constants(torch.export.export(module, (torch.zeros(1, 3, 16, 24),)))
    assert sorted(program.constants) == ['folded_0', 'folded_1']
    again = fold_constants(torch.export.export(program.module(), (torch.zeros(1, 3, 16, 24),)))
    assert not any(name.startswith('_prop_tensor') for name in (*again.constants, *again.state_dict))
    x = torch.randn(1, 3, 16, 24)
    assert torch.equal(again.module()(x), module(x))


@pytest.mark.slow
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('name', MODELS)
def test_models(name, features, tmp_path):
    subject = model_subject(name, features)
    path, conversion = converted(subject, Options(), tmp_path)
    assert compare(executorch.load(path), subject, inputs_for(subject, Options())).relative < 1e-4
    assert conversion.delegated_macs >= 0.9
    assert sum(conversion.operators.values()) <= 48


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_models_in_half_precision(name, tmp_path):
    subject = model_subject(name)
    path, _ = converted(subject, Options('fp16'), tmp_path)
    assert compare(executorch.load(path), subject, inputs_for(subject, Options())).relative < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize('name', ['test_mobilevitv2', 'test_ppma', 'test_myo', 'test_rmt'])
def test_models_with_a_dynamic_batch(name, tmp_path):
    subject, options = model_subject(name), Options(dynamic=frozenset(['batch']))
    subject.metadata['input']['dynamic'] = ['batch']
    path, _ = converted(subject, options, tmp_path)
    assert compare(executorch.load(path), subject, inputs_for(subject, options)).relative < 1e-4
