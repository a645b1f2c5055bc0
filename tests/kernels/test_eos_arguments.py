"""`eos_elementwise` and `eos_matmul` beside their values: errors, compilers, export, memory, operation counts."""
import pytest
import torch
from eos_cases import call, inputs
from helpers import assert_close
from operator_cases import TOLERANCE, assert_as_exact
from pairwise import slow
from torch import nn
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from lab.line_memory import FORMS, both_passes
from subquad import kernels
from subquad.kernels import eos_elementwise, eos_matmul
from subquad.kernels.common import checks
from subquad.kernels.eos_scan import DecayGenerator, fla
from subquad.kernels.eos_scan.chunks import triton_chunk

ops = torch.ops.subquad


def _tensors():
    return inputs('kd', 6, dtype=torch.float32)


# --- errors

WRONG_OPTIONS = [
    (dict(chunk=64.0), TypeError, r'chunk must be one of the integers 16, 32, 64, 128, got 64\.0'),
    (dict(chunk='64'), TypeError, "chunk must be one of the integers 16, 32, 64, 128, got '64'"),
    (dict(scale='2'), TypeError, "scale must be a finite number, got '2'"),
    (dict(scale=True), TypeError, 'scale must be a finite number, got True'),
    (dict(scale=float('nan')), ValueError, 'scale must be a finite number, got nan'),
    (dict(scale=float('inf')), ValueError, 'scale must be a finite number, got inf'),
    (dict(reverse='no'), TypeError, "reverse must be True or False, got 'no'"),
    (dict(bidirectional=1), TypeError, 'bidirectional must be True or False, got 1'),
    (dict(output_state='false'), TypeError, "output_state must be True or False, got 'false'"),
]


@pytest.mark.parametrize('change, error, message', [
    (dict(i=torch.zeros(3, 6, 5)), ValueError, 'i must have 4 dimensions'),
    (dict(e=torch.zeros(2, 3, 7, 4)), ValueError, r'e must have shape \(2, 3, 6, 4\)'),
    (dict(s=torch.zeros(2, 3, 6, 3)), ValueError, r's must have shape \(2, 3, 6, 4\) \(tokens and heads of i'),
    (dict(s=torch.zeros(3, 4, 6)), ValueError, r's must have shape \(3, 4, 5\)'),
    (dict(e=torch.zeros(2, 3, 6, 4).double()), TypeError, 'i, e, s must share a dtype'),
    (dict(e=torch.zeros(2, 3, 6, 4, dtype=torch.complex64)), TypeError, 'complex e or s need theta'),
    (dict(log_o_k=torch.full((3, 4), 0.5)), ValueError, 'log_o_k must not be positive .*, got 0.5'),
    (dict(log_o_k=torch.zeros(3, 5)), ValueError, r'log_o_k must have shape \(B, H, T, 4\), .* got \(3, 5\)'),
    (dict(log_o_d=torch.zeros(2, 3, 1, 5)), ValueError, 'log_o_d must have shape'),
    (dict(log_o=torch.zeros(3, 4, 4)), ValueError, 'log_o must have shape'),
    (dict(log_o=torch.ones(3, 4, 5)), ValueError, 'log_o must not be positive'),
    (dict(theta=torch.zeros(2, 4)), ValueError, 'theta must have shape'),
    (dict(theta=torch.zeros(3, 4, 2)), ValueError, 'theta must have shape'),
    (dict(generator='sigmoid'), TypeError, 'generator must be a DecayGenerator, got str'),
    (dict(generator=DecayGenerator(torch.zeros(2, 3, 6, 4), torch.zeros(3, 4, 5), 'z')), ValueError,
     "generator.axis must be one of 'k', 'd', got 'z'"),
    (dict(generator=DecayGenerator(torch.zeros(2, 3, 6, 4), torch.zeros(3, 4, 5), 'k', 'cosine')), ValueError,
     "generator.form must be one of 'sigmoid', 'exponential'"),
    (dict(generator=DecayGenerator(torch.zeros(2, 3, 6, 4), torch.zeros(3, 4, 5), 'k', tau=0)), ValueError,
     'generator.tau must be a positive finite number, got 0'),
    *((dict(generator=DecayGenerator(torch.zeros(2, 3, 6, 4), torch.zeros(3, 4, 5), 'k', tau=tau)), error,
       f'generator.tau must be a positive finite number, got {tau!r}')
      for tau, error in (('2', TypeError), (None, TypeError), (float('nan'), ValueError), (float('inf'), ValueError))),
    (dict(generator=DecayGenerator(torch.zeros(2, 3, 6, 4), torch.zeros(3, 4, 5), 'd')), ValueError,
     r'generator.z must have shape \(2, 3, 6, 5\)'),
    (dict(generator=DecayGenerator(torch.zeros(2, 3, 6, 4), torch.zeros(3, 2, 5), 'k')), ValueError,
     r'generator.weight must have shape \(3, 4 or 1, 5 or 1\), got \(3, 2, 5\)'),
    (dict(generator=DecayGenerator(-torch.ones(2, 3, 6, 4), torch.ones(3, 4, 5), 'k', 'exponential')), ValueError,
     "generator.z must not be negative with form='exponential', got -1"),
    (dict(generator=DecayGenerator(torch.zeros(2, 3, 6, 4), torch.zeros(3, 4, 5), 'k'),
          log_o=torch.zeros(3, 4, 5)), ValueError, 'either log_o or generator'),
    (dict(generator=DecayGenerator(torch.zeros(2, 3, 6, 4), torch.zeros(3, 4, 5), 'k'), theta=torch.zeros(3, 4)),
     ValueError, 'theta needs a decay of rank one'),
    (dict(reverse=True, bidirectional=True), ValueError, 'exclude each other'),
    (dict(bidirectional=True, output_state=True), ValueError, 'need one direction'),
    (dict(initial_state=torch.zeros(2, 3, 5, 4)), ValueError, r'initial_state must have shape \(2, 3, 4, 5\)'),
    (dict(initial_state=torch.zeros(2, 3, 4, 5, dtype=torch.complex64)), TypeError, 'needs theta'),
    (dict(chunk=24), ValueError, 'chunk must be one of the integers 16, 32, 64, 128, got 24'),
    (dict(backend='fast'), ValueError, "unknown backend 'fast'"),
    (dict(e=torch.zeros(2, 3, 6, 129), s=torch.zeros(2, 3, 6, 129), log_o=torch.zeros(3, 129, 5), backend='triton'),
     ValueError, 'cannot run: the kernels take memories of at most 128 rows'),
    (dict(i=torch.zeros(2, 3, 6, 5, device='meta')), ValueError, 'e is on cpu, the other arguments on meta'),
    *WRONG_OPTIONS,
], ids=str)
def test_wrong_arguments_of_eos_elementwise(change, error, message):
    i, e, s = _tensors()[:3]
    with pytest.raises(error, match=message):
        eos_elementwise(**{**dict(i=i, e=e, s=s), **change})


@pytest.mark.parametrize('change, error, message', [
    (dict(a=torch.zeros(2, 3, 6, 3)), ValueError, r'a must have shape \(2, 3, 6, 4\)'),
    (dict(b=torch.zeros(3, 4, 5)), ValueError, 'b must have 4 dimensions'),
    (dict(e=torch.zeros(2, 3, 6, 4, dtype=torch.complex64)), TypeError, 'e must be real'),
    (dict(gk=torch.ones(3, 1)), ValueError, 'gk must not be positive'),
    (dict(gk=torch.zeros(2, 3, 6, 5)), ValueError, 'gk must have shape'),
    (dict(reverse=True, bidirectional=True), ValueError, 'exclude each other'),
    (dict(chunk=0), ValueError, 'chunk must be one of'),
    (dict(backend='fast'), ValueError, "eos_matmul: unknown backend 'fast'"),
    *WRONG_OPTIONS,
], ids=str)
def test_wrong_arguments_of_eos_matmul(change, error, message):
    i, e, s = _tensors()[:3]
    with pytest.raises(error, match=message):
        eos_matmul(**{**dict(i=i, e=e, s=s, a=e, b=-e), **change})


@pytest.mark.parametrize('length, half, single', [(1, 64, 32), (32, 64, 32), (33, 64, 16), (64, 64, 16), (65, 32, 16),
                                                  (4096, 32, 16)])
def test_chunks_of_triton_are_those_of_the_docstring(length, half, single):
    for chunk in (16, 32, 64, 128):
        for dtype in (torch.float16, torch.bfloat16):
            assert triton_chunk(dtype, length, chunk) == (half if length <= 64 else min(half, chunk))
        for dtype in (torch.float32, torch.float64):
            assert triton_chunk(dtype, length, chunk) == single


@pytest.mark.parametrize('name', ['kd', 'delta'])
def test_backend_fla_says_why_it_cannot_run(name, monkeypatch):
    monkeypatch.setattr(fla, 'interpreted', lambda: False)
    monkeypatch.setattr(fla, 'installed', lambda: False)
    tensors, op = inputs(name, 6), 'eos_matmul' if name == 'delta' else 'eos_elementwise'
    with pytest.raises(ValueError, match=rf"{op}: backend 'fla' cannot run: .* \(pip install fla-core\)"):
        call(name, tensors, 'fla')
    monkeypatch.setattr(fla, 'installed', lambda: True)
    with pytest.raises(ValueError, match='the arguments are on cpu, and fla-core runs on a GPU'):
        call(name, tensors, 'fla')
    monkeypatch.setattr(fla, 'interpreted', lambda: True)
    with pytest.raises(ValueError, match='takes float32, float16 and bfloat16, and the arguments are torch.float64'):
        call(name, tensors, 'fla')


@pytest.mark.parametrize('name, message', [
    ('sigmoid k', 'no oscillation of full rank'), ('constant e and s', 'no constant e or s'),
    ('wide delta', 'at most 256 keys, got 257')])
def test_backend_fla_lacks_some_rows(name, message):
    tensors = inputs('delta', 2, 257) if name == 'wide delta' else inputs(name, 6)
    with pytest.raises(ValueError, match=f"backend 'fla' cannot run: .*{message}"):
        call(name.removeprefix('wide '), tensors, 'fla')


def test_backend_fla_is_for_the_recurrences_alone():
    allowed = 'auto, triton, native, portable, reference, export'
    with pytest.raises(ValueError, match=f"unknown backend 'fla'; allowed: {allowed}$"):
        kernels.polyline_scan(torch.zeros(1, 1, 2, 2, 2), *(torch.zeros(1, 1, 2, 2),) * 2, backend='fla')
    with pytest.raises(ValueError, match="use_backend: unknown backend 'fla'"), kernels.use_backend('fla'):
        pass


@pytest.mark.parametrize('name', ['kd', 'delta k'])
@pytest.mark.parametrize('backend', ['reference', 'portable', 'export'])
def test_positive_step_logs_count_as_zero_where_they_cannot_be_read(name, backend, monkeypatch):
    monkeypatch.setattr(checks, 'step_logs', lambda op, **logs: None)
    tensors = inputs(name, 20)
    last = tensors[-1].clone()
    last[:, :, ::3] *= -1
    y = call(name, [*tensors[:-1], last], backend)
    assert_close(y, call(name, [*tensors[:-1], last.clamp(max=0)], 'reference'), 1e-12)


def test_expanded_tensors_whose_memory_is_too_large_are_refused():
    one = torch.zeros(1, 1, 1, 1).expand(1 << 10, 1 << 10, 1, 1 << 10)
    with pytest.raises(ValueError, match='eos_elementwise: the memory has a shape of .* takes 4,398 GB'):
        eos_elementwise(one, one, one, output_state=True)
    with pytest.raises(ValueError, match='eos_matmul: the memory has a shape of .* takes 4,398 GB'):
        eos_matmul(one, one, one, a=one, b=one, output_state=True)


# --- compilers and exporters

@pytest.mark.parametrize('name', ['kd', 'scalar', 'sigmoid k', 'exponential', 'delta k', 'theta'])
def test_compiled_graphs_have_no_break(name):
    for length, direction in ((9, 'both'), (70, 'reverse')):
        torch._dynamo.reset()
        tensors = [x.requires_grad_() for x in inputs(name, length, dtype=torch.float32)]
        compiled = torch.compile(lambda *x, way=direction: call(name, x, 'auto', way), backend='aot_eager',
                                 fullgraph=True)
        y, expected = compiled(*tensors), call(name, tensors, 'portable', direction)
        assert_as_exact([y, *torch.autograd.grad(y.square().sum(), tensors)],
                        [expected, *torch.autograd.grad(expected.square().sum(), tensors)], TOLERANCE[torch.float32])


def test_a_compiled_graph_takes_lines_of_any_length():
    def both(i, e, s, g, weight):
        y = eos_elementwise(i, e, s, generator=DecayGenerator(g, weight, 'k'))
        delta, memory = eos_matmul(i, e, s, a=e, b=-e * 0.1, gk=g, output_state=True)
        return y + eos_elementwise(i, e, s, log_o_k=g, bidirectional=True) + delta, memory
    torch._dynamo.reset()
    compiled, graphs = torch.compile(both, backend='aot_eager', fullgraph=True, dynamic=True), []
    for length in (70, 90, 130):
        i, e, s, g = inputs('k', length, dtype=torch.float32)
        i, e, weight = i.requires_grad_(), torch.nn.functional.normalize(e, dim=-1), torch.randn(3, 4, 5)
        results = [call(i, e, s, g, weight) for call in (compiled, both)]
        for actual, expected in zip(*([*x, *torch.autograd.grad(x[0].sum() + x[1].sum(), i)] for x in results)):
            torch.testing.assert_close(actual, expected)
        graphs.append(torch._dynamo.utils.counters['stats']['unique_graphs'])
    assert graphs[0] == graphs[-1]


def test_opcheck():
    for length in (6, 70):
        i, e, s, g, h = (x.requires_grad_() for x in inputs('kd', length, batch=1, dtype=torch.float32))
        state = torch.randn(1, 3, 4, 5, requires_grad=True)
        torch.library.opcheck(ops.eos_elementwise_portable_fwd, (i, e, s, g, h, None, 'both', 16, True, False))
        torch.library.opcheck(ops.eos_elementwise_portable_fwd, (i, e, s, None, h, state, 'reverse', 16, True, True))
        weight = torch.randn(3, 4, 5, requires_grad=True)
        torch.library.opcheck(ops.eos_elementwise_full_portable_fwd, (
            i, e, s, None, h, e.detach().unsqueeze(-1).requires_grad_(), weight, state, 'sigmoid', 4.0, 'forward', True,
            True))
        torch.library.opcheck(ops.eos_matmul_portable_fwd, (i, e, s, e, s, g, None, 'both', 16, True, False))


def test_opcheck_of_small_memories():
    """128 lines: a loop that saves no memories. `torch.compile` takes shapes from what stands in for the operator."""
    i, e, s, g = (x.requires_grad_() for x in inputs('k', 70, 2, 1, 32, 4, dtype=torch.float32))
    for direction, state in (('both', None), ('forward', torch.randn(32, 4, 2, 1, requires_grad=True))):
        arguments = i, e, s, g, None, state, direction, 16, True, state is not None
        assert ops.eos_elementwise_portable_fwd(*arguments)[1].numel() == 0
        torch.library.opcheck(ops.eos_elementwise_portable_fwd, arguments)


class _Module(nn.Module):
    def __init__(self, name, direction, backend='auto'):
        super().__init__()
        self.name, self.direction, self.backend = name, direction, backend

    def forward(self, *tensors):
        return call(self.name, tensors, self.backend, self.direction)


@pytest.mark.parametrize('name', ['kd', 'delta k', *slow(
    'theta', 'sigmoid k', 'ones', 'constant', 'scalar', 'log_o', 'constant e and s', 'exponential', 'delta')])
def test_export(name):
    """Exported graphs have no operator of ours and, on a line and on several chunks, no tensor of rank above 4."""
    for length, direction in ((7, 'both'), (70, 'forward')):
        tensors = inputs(name, length, dtype=torch.float32)
        program = torch.export.export(_Module(name, direction), tuple(tensors))
        program = program.run_decompositions()
        assert 'subquad' not in program.graph_module.code and 'triangular' not in program.graph_module.code
        values = [x for node in program.graph.nodes for x in tree_iter(node.meta.get('val'))]
        assert max(x.ndim for x in values if isinstance(x, torch.Tensor)) <= 4
        torch.testing.assert_close(program.module()(*tensors), call(name, tensors, 'portable', direction), rtol=1e-4,
                                   atol=1e-5)


@torch.no_grad()
def test_export_of_the_portable_operator_with_any_batch():
    """The form that runs depends on the number of lines, which an exported graph leaves open."""
    module, tensors = _Module('k', 'forward', 'portable'), inputs('k', 20, 2, 1, 8, 4, dtype=torch.float32)
    batch = torch.export.Dim('batch', min=2, max=4096)
    program = torch.export.export(module, tuple(tensors), dynamic_shapes=(({0: batch},) * 4,))
    for size in (2, 40):
        tensors = inputs('k', 20, 2, 1, size, 4, dtype=torch.float32)
        torch.testing.assert_close(program.module()(*tensors), module(*tensors))


@pytest.mark.parametrize('name', ['kd', 'sigmoid k', *slow('scalar', 'delta k', 'theta')])
def test_export_with_any_batch(name):
    tensors, batch = inputs(name, 9, dtype=torch.float32), torch.export.Dim('batch', min=1, max=64)
    sizes = tuple({0: batch} if x.ndim == 4 else None for x in tensors)
    program = torch.export.export(_Module(name, 'both'), tuple(tensors), dynamic_shapes=(sizes,))
    several = [torch.cat([x, x, x]) if x.ndim == 4 else x for x in tensors]
    expected = call(name, several, 'portable', 'both')
    torch.testing.assert_close(program.module()(*several), expected, rtol=1e-4, atol=1e-5)


# --- memory and operations

def _peak(run) -> int:
    """Return the most bytes that were allocated at a time during run(), inside of operators too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = found.profiler.kineto_results.events()
    events = sorted((x.start_ns(), x.nbytes()) for x in events if x.name() == '[memory]')
    total = peak = 0
    for _, size in events:
        total += size
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize('kind, size', [('full rank', 4), ('constant angles', 8)])
def test_memory_does_not_grow_with_the_memories_of_all_tokens(kind, size):
    """At T = 4,096, K = 32, D = 64 at most an eighth of the form that stores them, both passes."""
    form, peaks = FORMS[kind], []
    for length in (1024, 4096):
        given = form.inputs(length, 32, 64)
        peaks.append(_peak(lambda given=given: both_passes(form.output, given)))
    numbers = 4096 * 32 * 64 * size                                          # bytes of one number for each element
    assert peaks[1] < numbers / 2
    if kind == 'full rank':
        # Growth with T is that of the arguments' gradients and of one memory for 32 tokens.
        assert peaks[1] - peaks[0] < 3072 * 4 * (8 * (64 + 3 * 32) + 3 * 32 * 64 / 32)
    reference = _peak(lambda: both_passes(form.materialized, given))
    assert reference > 4 * numbers and peaks[1] < reference / 8


@pytest.mark.parametrize('name, forward, backward', [
    ('kd', 2 * 64 * (4 + 5) + 4 * 4 * 5, 5 * 64 * (4 + 5) + 8 * 4 * 5),
    ('sigmoid k', 6 * 4 * 5, 16 * 4 * 5),
    ('delta', 8 * 64 * (4 + 5) + 8 * 4 * 5, 20 * 64 * (4 + 5) + 20 * 4 * 5)])
def test_operation_counts(name, forward, backward):
    """For each token: products of a chunk of 64 tokens, and of memories of 4 x 5 numbers."""
    tensors = [x.requires_grad_() for x in inputs(name, 128)]
    with FlopCounterMode(display=False) as counter:
        y = call(name, tensors, 'portable')
    assert counter.get_total_flops() == 2 * 3 * 128 * forward
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * 3 * 128 * backward
