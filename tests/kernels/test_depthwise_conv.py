"""Depthwise convolution: every backend against the float64 reference, with gradients; layouts, dtypes, registration
with PyTorch. Kernels run on a GPU, or without one in Triton's interpreter."""
import pytest
import torch
import torch.nn.functional as F
from operator_cases import DEVICE, TOLERANCE, skip_without_triton, weighted_sum
from torch.utils.flop_counter import FlopCounterMode

from subquad import kernels
from subquad.kernels import native
from subquad.kernels.common import launch

BACKENDS = ['portable', 'export', 'triton']
# The forms that backbones use: of a block, of a feed-forward layer, and of LePE.
FORMS = {'residual': dict(residual=True), 'gelu': dict(residual=True, gelu=True), 'add': dict(add=True),
         'plain': dict(), 'all': dict(residual=True, gelu=True, add=True)}


def _needs_triton(backend):
    if backend == 'triton':
        skip_without_triton()


def _inputs(shape, window, add=False, dtype=torch.float32):
    """Return x, weight, bias and, with `add`, the tensor to add."""
    g = torch.Generator().manual_seed(sum(shape) + window)
    shapes = [shape, (shape[3], 1, window, window), (shape[3],)] + ([shape] if add else [])
    return [torch.randn(s, generator=g).to(DEVICE, dtype) for s in shapes]


def _run(inputs, backend, layout=lambda x: x, **options):
    """Return the output and all gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    x, weight, bias, *add = leaves
    y = kernels.depthwise_conv(layout(x), weight, bias, *map(layout, add), backend=backend, **options)
    weighted_sum(y).backward()
    return [y.detach()] + [x.grad for x in leaves]


def _check(inputs, backend, **options):
    _needs_triton(backend)
    layout = options.pop('layout', lambda x: x)
    expected = _run([x.double() for x in inputs], 'reference', **options)
    actual = _run(inputs, backend, layout, **options)
    dtype = inputs[0].dtype
    assert actual[0].dtype == dtype and actual[0].shape == inputs[0].shape
    largest = max(y.abs().max() for y in expected)
    for n, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert x.isfinite().all(), n
        twice = n and dtype != torch.float32                    # gradients pass through rounded numbers, too
        scale = y.abs().max().clamp(min=0.05 * largest)         # gradients that cancel are held to the others' scale
        if n in (2, 3):                                         # parameters: sums over tokens, which may cancel
            scale = scale.clamp(min=0.2 * (y.new_tensor(inputs[0].shape[:3]).prod().sqrt()))
        assert (x.double() - y).abs().max() <= TOLERANCE[dtype] * (2 if twice else 1) * scale, n


@pytest.mark.parametrize('form, window', [*((form, 3) for form in FORMS), ('all', 1), ('add', 5), ('all', 5),
                                          ('all', 7)])
@pytest.mark.parametrize('backend', BACKENDS)
def test_values_and_gradients(backend, form, window):
    options = dict(FORMS[form])
    _check(_inputs((2, 5, 9, 6), window, options.pop('add', False)), backend, **options)


@pytest.mark.parametrize('shape', [(1, 1, 1, 1), (3, 1, 13, 5), (1, 13, 1, 70), (2, 7, 7, 17), (1, 16, 15, 3)], ids=str)
@pytest.mark.parametrize('backend', BACKENDS)
def test_grids(backend, shape):
    """One token, one row, one column; sides that are a multiple of a strip or one more."""
    _check(_inputs(shape, 3), backend, residual=True, gelu=True)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('backend', BACKENDS)
def test_half_types(backend, dtype):
    _check(_inputs((2, 5, 8, 6), 3, True, dtype), backend, residual=True, gelu=True)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('backend', BACKENDS)
def test_float32_weights_of_half_tokens(backend, dtype):
    """Autocast leaves the weights in float32; their gradients are float32, too."""
    _needs_triton(backend)
    x, weight, bias = _inputs((1, 5, 8, 6), 3)
    leaves = [x.to(dtype).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    y = kernels.depthwise_conv(*leaves, backend=backend)
    weighted_sum(y).backward()
    expected = _run([x.to(dtype).double(), weight.double(), bias.double()], 'reference')
    assert y.dtype == dtype and [x.grad.dtype for x in leaves] == [dtype, torch.float32, torch.float32]
    for actual, exact in zip([y, *(x.grad for x in leaves)], expected):
        assert (actual.double() - exact).abs().max() <= 2 * TOLERANCE[dtype] * exact.abs().max()


LAYOUTS = {'channels first': lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
           'strided': lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
           'slice of channels': lambda x: torch.cat((x, x), 3)[..., :x.shape[3]],
           'transposed': lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('backend', BACKENDS)
def test_strides(backend, layout):
    _check(_inputs((2, 4, 5, 6), 3, True), backend, residual=True, layout=LAYOUTS[layout])


@pytest.mark.parametrize('backend', ['reference', 'native', *BACKENDS])
def test_without_bias(backend):
    _needs_triton(backend)
    if backend == 'native' and native.why_not():
        pytest.skip(native.why_not())
    x, weight, bias = _inputs((2, 5, 9, 6), 3)
    expected = _run([x.double(), weight.double(), torch.zeros_like(bias).double()], 'reference')
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = kernels.depthwise_conv(*leaves, backend=backend)
    weighted_sum(y).backward()
    for actual, exact in zip([y, *(leaf.grad for leaf in leaves)], expected):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(kernels.depthwise_conv(*leaves, backend=backend), y)


@pytest.mark.parametrize('backend', BACKENDS)
def test_a_strided_bias(backend):
    _needs_triton(backend)
    x, weight, bias = _inputs((1, 4, 5, 6), 3)
    expected = kernels.depthwise_conv(x, weight, bias, backend=backend)
    actual = kernels.depthwise_conv(x, weight, bias.repeat_interleave(2)[::2], backend=backend)
    torch.testing.assert_close(actual, expected)


def test_several_blocks_of_the_weight_gradient(monkeypatch):
    """Programs that sum several blocks of patches, and several programs."""
    _needs_triton('triton')
    from subquad.kernels.depthwise_conv import triton
    monkeypatch.setattr(triton, 'MANY_PROGRAMS', 3)
    monkeypatch.setattr(triton, '_CHANNEL_BLOCKS', (16,))
    monkeypatch.setattr(launch, 'interpreted', lambda: False)
    _check(_inputs((3, 9, 23, 20), 3), 'triton', residual=True)


def test_two_runs_are_equal():
    _needs_triton('triton')
    inputs = _inputs((2, 9, 9, 20), 3)
    first, second = (_run(inputs, 'triton', gelu=True, residual=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


def test_only_wanted_gradients_are_computed():
    _needs_triton('triton')
    x, weight, bias = _inputs((1, 4, 5, 6), 3)
    for n in range(3):
        leaves = [t.clone().requires_grad_(n == m) for m, t in enumerate((x, weight, bias))]
        kernels.depthwise_conv(*leaves, backend='triton').sum().backward()
        assert [t.grad is not None for t in leaves] == [n == m for m in range(3)]


@pytest.mark.parametrize('backend', ['portable', 'triton'])
def test_the_residual_form_is_a_convolution(backend):
    """y = h + DWConv(h), by PyTorch's own modules."""
    _needs_triton(backend)
    x, weight, bias = _inputs((2, 6, 5, 8), 3)
    h = F.gelu(x)
    expected = h + F.conv2d(h.permute(0, 3, 1, 2), weight, bias, padding=1, groups=8).permute(0, 2, 3, 1)
    actual = kernels.depthwise_conv(x, weight, bias, gelu=True, residual=True, backend=backend)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('form', ['gelu', 'add'])
def test_the_operator_passes_opcheck(form):
    _needs_triton('triton')
    options = dict(FORMS[form])
    x, weight, bias, *add = (x.requires_grad_() for x in _inputs((1, 3, 5, 4), 3, options.pop('add', False)))
    torch.library.opcheck(torch.ops.subquad.depthwise_conv_fwd, (
        x, weight, bias, add[0] if add else None, options.get('gelu', False), options.get('residual', False)))


@pytest.mark.parametrize('backend', ['portable', 'triton'])
def test_compiles_to_one_graph(backend):
    _needs_triton(backend)
    x, weight, bias, add = _inputs((1, 4, 6, 5), 3, True)

    def call(x, add):
        return kernels.depthwise_conv(x, weight, bias, add, gelu=True, residual=True, backend=backend)
    compiled = torch.compile(call, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(x, add), call(x, add))


def test_exported_graphs_hold_pytorch_operators_only():
    x, weight, bias, add = (t.cpu() for t in _inputs((1, 4, 6, 5), 3, True))

    class Layer(torch.nn.Module):
        def forward(self, x, add):
            return kernels.depthwise_conv(x, weight, bias, add, gelu=True, residual=True)
    program = torch.export.export(Layer(), (x, add))
    assert not [node for node in program.graph.nodes if 'subquad' in str(node.target)]
    torch.testing.assert_close(program.module()(x, add), Layer()(x, add))


def test_flops_are_those_of_a_convolution():
    _needs_triton('triton')
    x, weight, bias = _inputs((2, 4, 6, 5), 3)
    for backend in ('portable', 'triton'):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        with FlopCounterMode(display=False) as counter:
            y = kernels.depthwise_conv(*leaves, backend=backend)
        assert counter.get_total_flops() == 2 * (2 * 4 * 6 * 5) * 9, backend
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * (2 * 4 * 6 * 5) * 9


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_autocast_casts_the_tokens(dtype):
    x, weight, bias, add = _inputs((1, 4, 6, 5), 3, True)
    with torch.autocast(DEVICE, dtype):
        y = kernels.depthwise_conv(x, weight, bias, add, backend='portable')
    assert y.dtype == dtype


@pytest.mark.parametrize('change, error, message', [
    (dict(x=torch.zeros(4, 6, 5)), ValueError, 'x must have 4 dimensions'),
    (dict(x=torch.zeros(1, 4, 6, 5).long()), TypeError, 'x has dtype torch.int64'),
    (dict(x=[1]), TypeError, 'x must be a tensor, got list'),
    (dict(weight=torch.zeros(5, 1, 3, 5)), ValueError, r'weight must have shape \(5, 1, 5, 5\)'),
    (dict(weight=torch.zeros(4, 1, 3, 3)), ValueError, r'weight must have shape \(5, 1, 3, 3\)'),
    (dict(weight=torch.zeros(5, 1, 4, 4)), ValueError, 'windows of odd size, got 4 x 4'),
    (dict(weight=torch.zeros(5, 1, 3, 3).half()), TypeError, 'weight, bias must share a dtype'),
    (dict(weight=torch.zeros(5, 1, 3, 3).half(), bias=torch.zeros(5).half()), TypeError, 'weight must have the dtype'),
    (dict(bias=torch.zeros(4)), ValueError, r'bias must have shape \(5,\)'),
    (dict(add=torch.zeros(1, 4, 5, 5)), ValueError, r'add must have shape \(1, 4, 6, 5\)'),
    (dict(add=torch.zeros(1, 4, 6, 5).half()), TypeError, 'x, add must share a dtype'),
    (dict(backend='cuda'), ValueError, "unknown backend 'cuda'")])
def test_wrong_arguments_are_refused(change, error, message):
    arguments = dict(x=torch.zeros(1, 4, 6, 5), weight=torch.zeros(5, 1, 3, 3), bias=torch.zeros(5)) | change
    with pytest.raises(error, match=message):
        kernels.depthwise_conv(**arguments)


def test_large_windows_run_portably():
    _needs_triton('triton')
    x, weight, bias = _inputs((1, 4, 6, 5), 9)
    with pytest.raises(ValueError, match='windows of at most 7 x 7, and this one is 9 x 9'):
        kernels.depthwise_conv(x, weight, bias, backend='triton')
    _check([x, weight, bias], 'portable')
