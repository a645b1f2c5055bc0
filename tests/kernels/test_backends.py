"""The choice of the backend: why_not, context manager, environment variable, missing Triton, PyTorch's switches."""
import pytest
import torch

from subquad import kernels

HAS_GPU = torch.cuda.is_available()


def _inputs(height, width, dim=8):
    device = 'cuda' if HAS_GPU else 'cpu'
    q, k, v = (torch.randn(1, 1, height, width, dim, device=device) for _ in range(3))
    a, b = (-torch.rand(1, 1, height, width, device=device) for _ in range(2))
    return q, k, v, a, b


def test_why_not():
    pytest.importorskip('triton')
    inputs = _inputs(2, 3)
    if HAS_GPU:
        assert kernels.why_not('polyline_attention', *inputs) is None
    else:
        assert 'arguments are on cpu' in kernels.why_not('polyline_attention', *inputs)
        assert 'no GPU' in kernels.why_not('polyline_attention')
    with pytest.raises(ValueError, match=r"'triton' cannot run: the kernels take float32, float16 and bfloat16, "
                                         r'and the arguments are torch.float64'):
        kernels.polyline_attention(*(x.double() for x in inputs), backend='triton')
    with pytest.raises(ValueError, match='heads of at most 128 channels, and these have 130'):
        kernels.decay_attention(*_inputs(2, 2, dim=130)[:4], backend='triton')
    with pytest.raises(ValueError, match='unknown operator'):
        kernels.why_not('attention')


def test_environment_variable_selects_the_backend(python):
    done = python('import torch\nfrom subquad.kernels import polyline_scan as op\n'
                  'from subquad.kernels.dispatch import OPERATORS\n'
                  'table = OPERATORS["polyline_scan"].implementations\n'
                  'for name in list(table): table[name] = lambda *args, name=name: name\n'
                  'x = torch.ones(1, 1, 2, 2, 1); a = -x[..., 0]\n'
                  'print(op(x, a, a))', SUBQUAD_BACKEND='reference')
    assert done.stdout.strip() == 'reference', done.stderr


def test_without_triton(python):
    """Without Triton the operators run portably, and errors say that Triton is missing."""
    done = python('import sys; sys.modules["triton"] = None\n'
                  'import torch; from subquad import kernels\n'
                  'print(kernels.why_not("polyline_scan"))\n'
                  'x, a = torch.randn(1, 1, 2, 2, 3), -torch.rand(1, 1, 2, 2)\n'
                  'print(kernels.polyline_scan(x, a, a).shape)\n'
                  'try: kernels.polyline_scan(x, a, a, backend="triton")\n'
                  'except ValueError as error: print(error)')
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('Triton is not installed') == 2 and 'Size([1, 1, 2, 2, 3])' in done.stdout


def test_importing_the_package_does_not_import_the_kernels(python):
    """No module of the package may import `triton.language`; PyTorch itself may import Triton."""
    done = python('import sys; from subquad import kernels\n'
                  'ours = [name for name in sys.modules if name.startswith("subquad")]\n'
                  'assert ours and not [name for name in ours if hasattr(sys.modules[name], "tl")]')
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_either_tf32_switch_of_pytorch_is_read(python):
    """PyTorch raises an error for the older switch once the newer one is set."""
    done = python('import torch\nfrom subquad.kernels.common import launch\n'
                  'precision = lambda: launch.numerics(torch.float32)["PRECISION"]\n'
                  'assert precision() == "ieee"\n'
                  'torch.backends.cuda.matmul.fp32_precision = "tf32"\nassert precision() == "tf32"')
    assert done.returncode == 0, done.stderr
    done = python('import torch\nfrom subquad.kernels.common import launch\n'
                  'torch.set_float32_matmul_precision("high")\n'
                  'assert launch.numerics(torch.float32)["PRECISION"] == "tf32"')
    assert done.returncode == 0, done.stderr
