"""Triton kernels of decay and criss-cross attention: whole and long lines, launches, step logs, machine code."""
import json

import pytest
import torch
from operator_cases import CALLS, DEVICE, TOLERANCE, assert_as_exact, attention_inputs, run, skip_without_triton
from pairwise import slow, slow_cases
from torch.utils.flop_counter import FlopCounterMode

from subquad import kernels
from subquad.kernels.common import launch

skip_without_triton()

from subquad.kernels.decay_attention import triton as decay  # noqa: E402

CRISSCROSS = [name for name in CALLS if name.startswith('crisscross')]


def _inputs(height, width, dtype=torch.float32, heads=1, dim=8, dim_v=8):
    return attention_inputs(height, width, dtype, 1, heads, dim, dim_v, dim ** -0.5, torch.float32, DEVICE)


def _check(name, inputs, tolerance=None, layout=lambda x: x):
    """Compare output and gradients of the kernels with those of the reference on the same numbers in float64."""
    expected, wanted = run(CALLS[name], [x.double() for x in inputs], 'reference')
    actual, grads = run(CALLS[name], inputs, 'triton', layout)
    assert actual.dtype == inputs[2].dtype
    assert_as_exact((actual, *grads), (expected, *wanted), tolerance or TOLERANCE[inputs[0].dtype])


@pytest.fixture
def short_tiles(monkeypatch):
    """Lines of more than 16 tokens are long."""
    sides = {2: (16,) * 3, 4: (16,) * 3}
    monkeypatch.setattr(launch, 'LARGEST_TILE', {kernel: sides for kernel in launch.LARGEST_TILE})


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that are launched."""
    kind = type(decay._decay_attention_fwd_kernel)           # of compiled kernels, or of interpreted ones
    launched, run_kernel = [], kind.run

    def record(self, *args, **options):
        launched.append(self.fn.__name__.removeprefix('_decay_attention_').removesuffix('_kernel'))
        return run_kernel(self, *args, **options)
    monkeypatch.setattr(kind, 'run', record)
    return launched


# --- values and gradients

@pytest.mark.parametrize('name', CRISSCROSS)
def test_crisscross(name):
    _check(name, _inputs(3, 5, heads=2, dim_v=5))


@pytest.mark.parametrize('name, grid', [
    ('crisscross-additive-both', (18, 2)), ('crisscross-multiplicative-both', (2, 18)),
    ('crisscross-additive-v2h', (2, 18)), ('crisscross-multiplicative-h2v', (18, 2)), *slow_cases(
        ('crisscross-additive-both', (17, 18)), ('crisscross-additive-both', (2, 18)),
        ('crisscross-multiplicative-both', (18, 2)), ('crisscross-additive-v2h', (18, 2)),
        ('crisscross-multiplicative-v2h', (2, 18)), ('crisscross-additive-h2v', (2, 18)))])
def test_crisscross_of_long_lines(name, grid, short_tiles):
    """Long columns or long rows; the other lines are whole, but for one grid with both."""
    _check(name, _inputs(*grid))


@pytest.mark.parametrize('name, grid, dtype', [
    ('crisscross-additive-both', (18, 2), torch.bfloat16), ('crisscross-multiplicative-both', (3, 4), torch.float16),
    *slow_cases(('crisscross-multiplicative-both', (18, 2), torch.float16),
                ('crisscross-multiplicative-both', (3, 4), torch.bfloat16))])
def test_crisscross_in_half_types(name, grid, dtype, short_tiles):
    _check(name, _inputs(*grid, dtype))


@pytest.mark.parametrize('length', [17, 64, 65])
@pytest.mark.parametrize('name', ['decay-additive-row', 'decay-multiplicative-row'])
def test_lines_at_the_sides_of_tiles(name, length):
    """Whole lines of 16, 32 and 64 tokens, filled or not, and one that is just too long."""
    _check(name, _inputs(1, length))


@pytest.mark.parametrize('name', ['crisscross-multiplicative-v2h', *slow('crisscross-additive-both')])
def test_heads_of_different_channels(name, short_tiles):
    _check(name, _inputs(3, 18, dim=24, dim_v=40))


@pytest.mark.parametrize('name, grid', [('crisscross-additive-both', (3, 4)), ('decay-multiplicative-column', (3, 4)),
                                        ('decay-additive-row', (2, 18))])
def test_strided_inputs(name, grid, short_tiles):
    """Step logs are read where they are: heads last in memory, as a linear layer leaves them."""
    def layout(x):
        return x.permute(0, 2, 3, 1, *range(4, x.ndim)).contiguous().permute(0, 3, 1, 2, *range(4, x.ndim))
    _check(name, _inputs(*grid, heads=2), layout=layout)


@pytest.mark.parametrize('name, grid', [
    ('crisscross-multiplicative-both', (3, 5)), ('crisscross-additive-both', (2, 18)),
    ('decay-additive-column', (18, 2)), *slow_cases(('crisscross-multiplicative-both', (18, 2)))])
def test_extreme_steps(name, grid, short_tiles):
    """Step logs 0, tiny, -80 and -inf together. The gradient at a step of exactly 0 is one-sided here and 0 in the
    reference, so those of the steps are only finite."""
    inputs = _inputs(*grid)
    g = torch.Generator().manual_seed(0)
    values = torch.tensor([0.0, -1e-6, -80.0, -float('inf'), -0.5])
    for n in (3, 4):
        inputs[n] = values[torch.randint(0, 5, inputs[n].shape, generator=g)].to(DEVICE)
    expected, wanted = run(CALLS[name], [x.double() for x in inputs], 'reference')
    actual, grads = run(CALLS[name], inputs, 'triton')
    for n, (x, y) in enumerate(zip((actual, *grads), (expected, *wanted))):
        assert x is None and y is None or x.isfinite().all(), n
        if n < 4 and x is not None:
            assert (x.double() - y).abs().max() <= 2e-5 * y.abs().max().clamp(min=1), n


@pytest.mark.parametrize('length', [12, 20])
@pytest.mark.parametrize('mask_mode', ['additive', 'multiplicative'])
def test_peaked_logits(mask_mode, length, short_tiles):
    """Logits of hundreds, whose largest is masked, or stands at the end of the line."""
    q, k, v, a, _ = _inputs(1, length)
    k = k.clone()
    k[..., 0, :] = 300 * q[..., -1, :]
    k[..., -1, :] = 300 * q[..., 0, :]
    for steps in (torch.full_like(a, -60.0), torch.full_like(a, -1e-3)):
        y = kernels.decay_attention(q, k, v, steps, mask_mode=mask_mode, backend='triton')
        expected = kernels.decay_attention(*(x.double() for x in (q, k, v, steps)), mask_mode=mask_mode,
                                           backend='reference')
        assert (y.double() - expected).abs().max() <= 1e-4 * expected.abs().max()


# --- step logs

@pytest.mark.parametrize('length', [12, 20])
def test_first_step_of_a_line_is_not_used(length, short_tiles):
    inputs = _inputs(2, length)[:4]
    y, grads = run(_decay, inputs, 'triton')
    inputs[3][..., 0] = -80.0
    changed, _ = run(_decay, inputs, 'triton')
    assert (grads[3][..., 0] == 0).all() and (grads[3][..., 1:] != 0).any()
    assert (y - changed).abs().max() <= (0 if length <= 16 else 1e-5)     # outside of kernels, sums begin with it


def _decay(q, k, v, log_decay, backend):
    return kernels.decay_attention(q, k, v, log_decay, backend=backend)


@pytest.mark.parametrize('length', [12, 20])
def test_clamped_steps_have_no_gradient(length, short_tiles):
    inputs = _inputs(2, length)[:4]
    inputs[3][..., 3], inputs[3][..., 5], inputs[3][..., 7] = -80.5, -float('inf'), -79.5
    _, grads = run(_decay, inputs, 'triton')
    assert (grads[3][..., [3, 5]] == 0).all() and grads[3].isfinite().all()
    assert (grads[3][..., [1, 2, 4, 6]] != 0).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_step_logs_of_another_dtype(dtype):
    """Their gradients have that dtype."""
    inputs = _inputs(3, 4)[:4]
    inputs[3] = inputs[3].to(dtype)
    y, grads = run(_decay, inputs, 'triton')
    expected, wanted = run(_decay, [x.double() for x in inputs], 'reference')
    assert y.dtype == torch.float32 and grads[3].dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[3].double(), wanted[3], rtol=1e-2, atol=1e-5 if dtype == torch.float64 else 1e-3)


# --- launches


@pytest.mark.parametrize('name, saved', [('crisscross-additive-both', 2), ('crisscross-additive-v2h', 1),
                                         ('decay-additive-row', 0)])
def test_whole_lines_save_little(name, saved):
    """Beside its inputs the backward pass gets P_h v and P_w v, no output and no log-sum-exps."""
    inputs = [x.requires_grad_() for x in _inputs(3, 4)]
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: tensors.append(x) or x, lambda x: x):
        CALLS[name](*inputs, 'triton')
    pointers = {x.data_ptr() for x in inputs}
    kept = [x for x in tensors if x.ndim and x.numel() and x.data_ptr() not in pointers]     # checks keep scalars
    assert [x.shape for x in kept] == [inputs[2].shape] * saved


# --- what PyTorch sees

def _op_arguments(grid, paths, mask_mode='additive'):
    q, k, v, a, b = _inputs(*grid)
    ops = torch.ops.subquad
    saved = ops.crisscross_attention_fwd(q, k, v, a, b, mask_mode, paths, True)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, a, b)]
    return [(ops.crisscross_attention_fwd, (*leaves, mask_mode, paths, True)),
            (ops.crisscross_attention_fwd, (q, k, v, a, b, mask_mode, paths, False)),
            (ops.crisscross_attention_bwd, (v, [q, k, v, a, b], list(saved), mask_mode, paths))]


@pytest.mark.parametrize('paths, grid', [('both', (1, 2)), *slow_cases(
    ('v2h', (1, 17)), ('h2v', (1, 2)), ('both', (2, 17)), ('h2v', (2, 17)))])
def test_opcheck(paths, grid, short_tiles):
    for op, arguments in _op_arguments(grid, paths):
        torch.library.opcheck(op.default, arguments)


def test_compiled_gradients():
    call, inputs = CALLS['crisscross-additive-both'], _inputs(2, 3)
    compiled = torch.compile(call, fullgraph=True, backend='aot_eager')
    (y, grads), (expected, wanted) = (run(f, inputs, 'triton') for f in (compiled, call))
    torch.testing.assert_close((y, *grads), (expected, *wanted))


def test_flop_counters_count():
    """Twice the multiplications of the definition: 15 tokens, 3 + 5 keys each, 8 and 4 channels."""
    inputs = [x.requires_grad_() for x in _inputs(3, 5, heads=2, dim_v=4)]
    with FlopCounterMode(display=False) as counter:
        y = CALLS['crisscross-additive-both'](*inputs, 'triton')
    assert counter.get_total_flops() == 2 * 2 * 15 * 8 * (8 + 2 * 4)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 15 * 8 * (3 * 8 + 4 * 4)


def test_results_are_the_same_every_time():
    inputs = _inputs(3, 5)
    (y, grads), (again, same) = (run(CALLS['crisscross-additive-both'], inputs, 'triton') for _ in range(2))
    assert all(torch.equal(x, z) for x, z in zip((y, *grads), (again, *same)))


# --- machine code

COMPILE = '''
import json, torch
from lab import aot, machine_code
from subquad.kernels.crisscross_attention import triton as crisscross  # noqa: E402
from subquad.kernels.decay_attention import triton as decay  # noqa: E402

found = []
for length, dim in {problems!r}:
    q, k, v, grad = (torch.empty(2, length, length, 4, dim, dtype=torch.bfloat16, device='meta').permute(0, 3, 1, 2, 4)
                     for _ in range(4))
    steps = [torch.empty(2, length, length, 4, device='meta').permute(0, 3, 1, 2) for _ in range(2)]
    with aot.compiling_for('cuda:90') as kernels:
        decay.forward(q, k, v, steps[0], 'row', 'additive', True)
        saved = crisscross.forward(q, k, v, *steps, 'additive', 'both', True)
        crisscross.backward(grad, [q, k, v, *steps], list(saved), 'additive', 'both')
    for code in map(machine_code.analyze, kernels):
        found.append(dict(name=code.name, stack=code.stack, duplicates=code.duplicates(), loops=len(code.loops),
                          per_pair=code.per_item(code.constants.get('BLOCK') ** 2)))
print(json.dumps(found))
'''


def _compiled(python, *problems):
    """Compile for (length of lines, channels): decay attention forward, then criss-cross attention."""
    done = python(COMPILE.format(problems=problems), TRITON_INTERPRET='0')
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Thread-instructions per pair of the forward kernel that ran whole lines of 56 tokens through the running softmax, with
# four warps, at 16 and at 32 channels.
RUNNING_SOFTMAX = {16: 24.0, 32: 27.2}


@pytest.mark.slow
@pytest.mark.parametrize('channels', [16, 32])
def test_whole_lines_take_few_instructions(channels, python):
    """At most 60 % of those with the running softmax; no loop, no spilled register, no work done twice."""
    forward, *others = _compiled(python, (56, channels))
    assert [code['name'].removeprefix('decay_attention_') for code in (forward, *others)] == [
        'fwd_line', 'fwd_line', 'fwd_line', 'fwd_line', 'transposed_line', 'bwd_line', 'bwd_line']
    assert forward['per_pair'][0] <= 0.6 * RUNNING_SOFTMAX[channels]
    for code in (forward, *others):
        assert (code['stack'], code['duplicates'], code['loops']) == (0, 1, 0), code


@pytest.mark.slow
def test_small_tiles_and_long_lines_do_no_work_twice(python):
    codes = _compiled(python, (14, 32), (28, 32), (100, 32))
    assert {code['name'] for code in codes} >= {f'decay_attention_{name}{line}' for line in ('', '_line')
                                                for name in ('fwd', 'bwd', 'transposed')}
    for code in codes:
        assert (code['stack'], code['duplicates']) == (0, 1), code
