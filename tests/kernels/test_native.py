"""Native operators against the float64 references: grids, heads, strides, dtypes, strong decays, numbers out of range.

The slow part runs the same under sanitizers, in libraries that it compiles."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from operator_cases import CALLS, TOLERANCE, assert_as_exact, run
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from subquad import kernels, prepare
from subquad.kernels import native
from subquad.kernels.polyline_attention import native_forward

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f'no native operators: {native.why_not()}')
ATTENTIONS = ['polyline_attention', 'crisscross_attention']
ROOT = Path(__file__).resolve().parents[2]


def _inputs(grid, dim, value_dim=None, batch=2, heads=3, dtype=torch.float32, decay=2.0):
    """Return q, k, v, log_alpha and log_beta, the heads of a token side by side."""
    g = torch.Generator().manual_seed(dim + sum(grid))
    q, k, v = (torch.randn(batch, *grid, heads, d, generator=g).to(dtype).permute(0, 3, 1, 2, 4)
               for d in (dim, dim, value_dim or dim))
    logs = -decay * torch.rand(2, batch, heads, *grid, generator=g)
    return q, k * dim ** -0.5, v, *logs.to(dtype)


def _assert_close(actual, expected, dtype):
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() <= TOLERANCE[dtype] * expected.abs().max().clamp(min=1e-3)


@pairwise('op, grid, dims, dtype, mask_mode, paths', ATTENTIONS,
          [(5, 7), (1, 1), (1, 9), (17, 1), (14, 14), (3, 33)], [(8, 8), (32, 32), (30, 20), (128, 64)],
          [torch.float32, torch.bfloat16], ['additive', 'multiplicative'], ['both', 'v2h', 'h2v'])
def test_attention(op, grid, dims, dtype, mask_mode, paths):
    inputs = _inputs(grid, *dims, dtype=dtype)
    attend = getattr(kernels, op)
    expected = attend(*(x.double() for x in inputs), mask_mode=mask_mode, paths=paths, backend='reference')
    for x in (inputs, [x.contiguous() for x in inputs]):
        _assert_close(attend(*x, mask_mode=mask_mode, paths=paths, backend='native'), expected, dtype)


@pytest.mark.parametrize('op', ATTENTIONS)
def test_few_groups_share_the_threads(op):
    # One image and one head: all threads work on one grid. Many: each works on its own.
    inputs = _inputs((9, 6), 16, batch=8)
    attend = getattr(kernels, op)
    whole = attend(*inputs, backend='native')
    single = [attend(*(x[b:b + 1, h:h + 1] for x in inputs), backend='native') for b in range(8) for h in range(3)]
    assert torch.equal(whole.flatten(0, 1), torch.cat(single).flatten(0, 1))


@pytest.mark.parametrize('op', ATTENTIONS)
@pytest.mark.parametrize('decay', [80., 300.])
def test_strong_decays(op, decay):
    inputs = _inputs((12, 11), 16, decay=decay)
    attend = getattr(kernels, op)
    _assert_close(attend(*inputs, backend='native'), attend(*(x.double() for x in inputs), backend='reference'),
                  torch.float32)


@pytest.mark.parametrize('op', ATTENTIONS)
@pytest.mark.parametrize('mask_mode', ['additive', 'multiplicative'])
def test_logits_far_above_a_tokens_own(op, mask_mode):
    q, k, v, *logs = _inputs((4, 5), 8)
    q[..., 0], k[..., 0] = 30, 0
    k[:, :, 2, 3, 0] = 500 / 30
    attend = getattr(kernels, op)
    expected = attend(*(x.double() for x in (q, k, v, *logs)), mask_mode=mask_mode, backend='reference')
    _assert_close(attend(q, k, v, *logs, mask_mode=mask_mode, backend='native'), expected, torch.float32)


@pytest.mark.parametrize('op', ATTENTIONS)
@pytest.mark.parametrize('name, value', [('q', torch.nan), ('k', torch.inf), ('v', torch.nan), ('v', -torch.inf)])
def test_numbers_that_are_not_finite(op, name, value):
    inputs = dict(zip(('q', 'k', 'v', 'log_alpha', 'log_beta'), _inputs((4, 5), 8, batch=1)))
    inputs[name][0, 1, 2, 3, 4] = value
    attend = getattr(kernels, op)
    a, b = (attend(**inputs, backend=backend) for backend in ('native', 'portable'))
    assert torch.equal(a.isfinite(), b.isfinite()) and torch.equal(a.isnan(), b.isnan())


def test_rotation_and_decay_inside():
    q, k, v, x, y = _inputs((5, 6), 16)
    x, y, bias, rate = -x, -y, torch.tensor([-3., 0.5, 25.]), torch.tensor([1., 0.1, 2.])
    table = torch.stack([f(torch.arange(30.)[:, None] * torch.rand(8)) for f in (torch.cos, torch.sin)], -1)
    logs = [-rate[:, None, None] * torch.nn.functional.softplus(z + bias[:, None, None]) for z in (x, y)]
    rotated = kernels.rotary_embedding(q.flatten(2, 3), k.flatten(2, 3), table, 0.25, backend='reference')
    expected = kernels.polyline_attention(*(z.unflatten(2, (5, 6)) for z in rotated), v, *logs, backend='reference')
    _assert_close(native_forward(q, k, v, x, y, 'additive', 'both', table, 0.25, bias, rate), expected, torch.float32)
    q[0, 0, 0, 0] = 1e4                                           # out of range: PyTorch rotates
    rotated = kernels.rotary_embedding(q.flatten(2, 3), k.flatten(2, 3), table, 0.25, backend='reference')
    expected = kernels.polyline_attention(*(z.unflatten(2, (5, 6)) for z in rotated), v, *logs, backend='reference')
    result = native_forward(q, k, v, x, y, 'additive', 'both', table, 0.25, bias, rate)
    assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


@pairwise('grid, channels, side, dtype, gelu, residual, add, strided',
          [(5, 7), (1, 1), (1, 9), (17, 3), (20, 14)], [8, 20, 3], [1, 3, 5, 7, 9], [torch.float32, torch.bfloat16],
          *[[False, True]] * 4)
def test_depthwise_conv(grid, channels, side, dtype, gelu, residual, add, strided):
    g = torch.Generator().manual_seed(channels + side)
    x = torch.randn(2, *grid, 2 * channels, generator=g).to(dtype)[..., ::1 + strided][..., :channels]
    weight, bias = torch.randn(channels, 1, side, side, generator=g), torch.randn(channels, generator=g)
    extra = torch.randn(2, channels, *grid, generator=g).to(dtype).permute(0, 2, 3, 1) if add else None
    options = dict(gelu=gelu, residual=residual)
    expected = kernels.depthwise_conv(x.double(), weight.double(), bias.double(), extra if extra is None else
                                      extra.double(), backend='reference', **options)
    for kind in (torch.float32, dtype):
        actual = kernels.depthwise_conv(x, weight.to(kind), bias.to(kind), extra, backend='native', **options)
        _assert_close(actual, expected, dtype)


@pairwise('grid, channels, side, dtype, gelu, residual, frozen',
          [(5, 7), (1, 1), (1, 9), (17, 3), (20, 14)], [16, 20, 3], [1, 3, 5, 7, 9], [torch.float32, torch.bfloat16],
          *[[False, True]] * 2, [None, 'x', 'weight'])
def test_gradients_of_depthwise_conv(grid, channels, side, dtype, gelu, residual, frozen):
    g = torch.Generator().manual_seed(channels + side)
    inputs = dict(x=torch.randn(3, *grid, 2 * channels, generator=g).to(dtype)[..., ::2],
                  weight=torch.randn(channels, 1, side, side, generator=g), bias=torch.randn(channels, generator=g))
    grad = torch.randn(3, channels, *grid, generator=g).to(dtype).permute(0, 2, 3, 1)
    found = []
    for convert, backend in ((lambda x: x.detach().clone(), 'native'), (lambda x: x.double(), 'reference')):
        leaves = {name: convert(x).requires_grad_(name != frozen) for name, x in inputs.items()}
        y = kernels.depthwise_conv(**leaves, gelu=gelu, residual=residual, backend=backend)
        y.backward(convert(grad))
        found.append([x.grad for name, x in leaves.items() if name != frozen])
    assert_as_exact(*found, TOLERANCE[dtype])


def test_second_gradients_of_depthwise_conv():
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=g) for shape in [(2, 4, 5, 8), (8, 1, 3, 3), (8,)]]
    found = []
    for convert, backend in ((torch.Tensor.clone, 'native'), (torch.Tensor.double, 'reference')):
        leaves = [convert(x).requires_grad_() for x in inputs]
        y = kernels.depthwise_conv(*leaves, gelu=True, backend=backend)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.pow(3).sum() for x in first), leaves))
    assert_as_exact(*found, TOLERANCE[torch.float32])


def test_empty_batches():
    q, k, v, *logs = (x[:0] for x in _inputs((4, 5), 8))
    assert kernels.polyline_attention(q, k, v, *logs, backend='native').shape == q.shape
    x, weight = torch.empty(0, 4, 5, 8, requires_grad=True), torch.ones(8, 1, 3, 3, requires_grad=True)
    y = kernels.depthwise_conv(x, weight, torch.ones(8), backend='native')
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape and not weight.grad.any()


@pairwise('op, grid, dims, dtype, paths', ['polyline', 'crisscross'],
          [(5, 7), (1, 1), (1, 9), (17, 1), (14, 14)], [(8, 8), (32, 20), (30, 64)],
          [torch.float32, torch.bfloat16], ['both', 'v2h', 'h2v'])
def test_attention_gradients(op, grid, dims, dtype, paths):
    inputs = _inputs(grid, *dims, dtype=dtype)
    call = CALLS[f'{op}-additive-{paths}']
    (y, grads), (expected, expected_grads) = run(call, inputs, 'native'), run(call, [x.double() for x in inputs],
                                                                               'reference')
    assert_as_exact([y, *grads], [expected, *expected_grads], TOLERANCE[dtype])


@pytest.mark.parametrize('op', ['polyline', 'crisscross'])
def test_gradients_of_logits_far_above_a_tokens_own(op):
    q, k, v, *logs = _inputs((4, 5), 8)
    q[..., 0], k[..., 0] = 30, 0
    k[:, :, 2, 3, 0] = 500 / 30
    (_, grads), (_, expected) = (run(CALLS[f'{op}-additive-both'], (q, k, v, *logs), backend)
                                 for backend in ('native', 'portable'))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected))


def test_gradients_that_the_library_lacks_come_from_another_backend():
    inputs = [x.requires_grad_() for x in _inputs((4, 5), 8)]
    for op in ATTENTIONS:
        getattr(kernels, op)(*inputs, mask_mode='multiplicative').sum().backward()
    assert all(x.grad is not None for x in inputs)


@pytest.mark.parametrize('op', ATTENTIONS)
def test_registration_with_pytorch(op):
    inputs = _inputs((3, 4), 8)
    node = getattr(torch.ops.subquad, f'{op}_native_fwd')
    torch.library.opcheck(node, (*inputs, 'additive', 'both'),
                          test_utils=('test_schema', 'test_faketensor', 'test_aot_dispatch_dynamic'))
    counts = []
    for backend in ('native', 'portable'):
        with FlopCounterMode(display=False) as counter:
            getattr(kernels, op)(*inputs, backend=backend)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_operators_without_native_form_say_so():
    with pytest.raises(ValueError, match='no native operator'):
        kernels.quadtree_solve([torch.ones(1, 1, 1, 1, 2)], [], backend='native')


def test_prepared_mixer():
    from subquad.backbones.mixers import PolylineMixer
    torch.manual_seed(0)
    for options in (dict(), dict(attention='crisscross', paths='v2h'),
                    dict(shared_decay=True, mask_mode='multiplicative')):
        mixer, x = PolylineMixer(32, 2, **options).eval(), torch.randn(2, 5, 7, 32)
        mixer.decay_scale = 2.0
        with torch.no_grad(), kernels.use_backend('portable'):
            expected = mixer(x)
        prepared = prepare(torch.nn.Sequential(mixer).eval())
        with torch.no_grad():
            assert type(prepared[0]).__name__ == 'NativeMixer'
            assert (prepared(x) - expected).abs().max() < 1e-6
            with kernels.use_backend('portable'):
                assert (prepared(x) - expected).abs().max() < 1e-6
        assert prepared(x).requires_grad


def test_instruction_sets_that_the_processor_lacks():
    code = 'import subquad.kernels'
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True,
                         env=dict(os.environ, SUBQUAD_INSTRUCTION_SET='mmx'))
    assert "unknown 'mmx'; this processor has" in done.stderr


def test_a_library_of_other_sources_is_left_out(monkeypatch):
    file = Path(native.LIBRARY._name)
    monkeypatch.setattr(native.Path, 'read_bytes', lambda path: b'other')
    with pytest.warns(UserWarning, match='built from other sources'):
        assert native.load(file) is None


# A team of threads that ThreadSanitizer understands, in place of libgomp's.
TEAM = """
#include <pthread.h>
struct Call { void (*body)(void*); void* data; };
static void* run(void* call) { ((Call*)call)->body(((Call*)call)->data); return nullptr; }
extern "C" void parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  Call call{body, data};
  pthread_t others[8];
  for (unsigned n = 1; n < threads; n++) pthread_create(others + n, nullptr, run, &call);
  body(data);
  for (unsigned n = 1; n < threads; n++) pthread_join(others[n], nullptr);
}
"""
RUN = """
import ctypes, sys
from pathlib import Path
import pytest
from subquad.kernels import native
library, team = map(Path, sys.argv[1:])
native.LIBRARY = native.load(library)
native.function.cache_clear()
if team.exists():
    function = ctypes.cast(ctypes.CDLL(str(team)).parallel, ctypes.c_void_p)
    ctypes.c_void_p.in_dll(native.LIBRARY, 'subquad_parallel').value = function.value
sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', '-m', 'not slow', '-k', 'not (registration or instruction)',
                      *map(str, Path('tests/kernels').glob('test_native*.py'))]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux' or shutil.which('g++') is None, reason='needs GCC on Linux')
@pytest.mark.parametrize('sanitizer', ['address', 'thread'])
def test_under_sanitizers(sanitizer, tmp_path):
    def runtime(name):
        return subprocess.run(['gcc', f'-print-file-name={name}'], capture_output=True, text=True).stdout.strip()

    flags = f"-fsanitize={dict(address='address,undefined').get(sanitizer, sanitizer)} -fno-sanitize-recover=all"
    subprocess.run([sys.executable, 'setup.py', '-q', 'build_ext', '--build-lib', tmp_path, '--build-temp', tmp_path],
                   cwd=ROOT, check=True, env=dict(os.environ, CFLAGS=flags, LDFLAGS=flags))
    library, team = next(tmp_path.rglob('operators*.so')), tmp_path / 'team.so'
    if sanitizer == 'thread':
        subprocess.run(['g++', '-shared', '-fPIC', '-fsanitize=thread', '-x', 'c++', '-', '-o', team], input=TEAM,
                       text=True, check=True)
    env = dict(os.environ, LD_PRELOAD=f"{runtime(f'lib{sanitizer[0]}san.so')} {runtime('libstdc++.so.6')}",
               ASAN_OPTIONS='detect_leaks=0', TSAN_OPTIONS=f'exitcode=0 log_path={tmp_path}/races',
               PYTHONPATH='tests/shared', OMP_NUM_THREADS='3')
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', RUN, library, team], cwd=ROOT, env=env,
                         capture_output=True, text=True)
    assert done.returncode == 0 and 'passed' in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    # PyTorch's own loops are reported, because its libgomp is not built for the sanitizer.
    races = ''.join(file.read_text() for file in tmp_path.glob('races*'))
    assert library.name not in races, races
