"""Calls of `eos_elementwise` and `eos_matmul` with every kind of oscillation, and inputs for them."""
import torch
import torch.nn.functional as F
from operator_cases import weighted_sum
from torch import Tensor

from subquad.kernels import eos_elementwise, eos_matmul
from subquad.kernels.eos_scan import DecayGenerator

DIRECTIONS = {'forward': {}, 'reverse': dict(reverse=True), 'both': dict(bidirectional=True)}


def _pair(x: Tensor) -> Tensor:
    """Return (..., 2) as complex numbers."""
    return torch.view_as_complex(x.contiguous())


# Name -> call(i, e, s, others, options), where `others` are the tensors of SHAPES.
CALLS = {
    'ones': lambda i, e, s, **kw: eos_elementwise(i, e, s, **kw),
    'k': lambda i, e, s, g, **kw: eos_elementwise(i, e, s, log_o_k=g, **kw),
    'd': lambda i, e, s, g, **kw: eos_elementwise(i, e, s, log_o_d=g, **kw),
    'kd': lambda i, e, s, g, h, **kw: eos_elementwise(i, e, s, log_o_k=g, log_o_d=h, **kw),
    'scalar': lambda i, e, s, g, **kw: eos_elementwise(i, e, s, log_o_k=g, **kw),
    'constant': lambda i, e, s, g, h, **kw: eos_elementwise(i, e, s, log_o_k=g, log_o_d=h, **kw),
    'constant scalar': lambda i, e, s, g, **kw: eos_elementwise(i, e, s, log_o_d=g, **kw),
    'scalar and d': lambda i, e, s, g, h, **kw: eos_elementwise(i, e, s, log_o_k=g, log_o_d=h, **kw),
    'theta': lambda i, e, s, theta, g, **kw: eos_elementwise(i, e, s, theta=theta, log_o_k=g, **kw),
    'constant theta': lambda i, e, s, theta, g, **kw: eos_elementwise(i, e, s, theta=theta, log_o_k=g, **kw),
    'complex bank': lambda i, e, s, theta, g, h, o, **kw: eos_elementwise(
        i, _pair(e), _pair(s), theta=theta, log_o_k=g, log_o_d=h, log_o=o, **kw),
    'constant bank': lambda i, e, s, theta, o, h, **kw: eos_elementwise(
        i, _pair(e), _pair(s), theta=theta, log_o=o, log_o_d=h, **kw),
    'constant modes': lambda i, e, s, theta, g, **kw: eos_elementwise(i, e, s, theta=theta, log_o_k=g, **kw),
    'log_o': lambda i, e, s, o, h, **kw: eos_elementwise(i, e, s, log_o=o, log_o_d=h, **kw),
    'log_o per token': lambda i, e, s, o, **kw: eos_elementwise(i, e, s, log_o=o, **kw),
    'constant e and s': lambda i, e, s, g, **kw: eos_elementwise(i, e, s, log_o_k=g, **kw),
    'sigmoid k': lambda i, e, s, z, w, **kw: eos_elementwise(i, e, s, generator=DecayGenerator(z, w, 'k', tau=4), **kw),
    'sigmoid d': lambda i, e, s, z, w, **kw: eos_elementwise(i, e, s, generator=DecayGenerator(z, w, 'd', tau=4), **kw),
    'exponential': lambda i, e, s, z, w, g, **kw: eos_elementwise(
        i, e, s, generator=DecayGenerator(z, w, 'd', 'exponential'), log_o_k=g, **kw),
    'delta': lambda i, e, s, a, b, **kw: eos_matmul(i, e, s, a=F.normalize(a, dim=-1), b=b, **kw),
    'delta k': lambda i, e, s, a, b, g, **kw: eos_matmul(i, e, s, a=F.normalize(a, dim=-1), b=b, gk=g, **kw),
    'delta scalar': lambda i, e, s, a, b, g, **kw: eos_matmul(i, e, s, a=F.normalize(a, dim=-1), b=b, gk=g, **kw),
    'delta constant': lambda i, e, s, a, b, g, **kw: eos_matmul(i, e, s, a=F.normalize(a, dim=-1), b=b, gk=g, **kw),
}
# The tensors after i, e and s. '-' marks step logs, '+' positive numbers and '~' short vectors.
_OTHERS = {
    'ones': (), 'k': ('-BHTK',), 'd': ('-BHTD',), 'kd': ('-BHTK', '-BHTD'), 'scalar': ('-BHT1',),
    'constant': ('-HK', '-HD'), 'constant scalar': ('-H1',), 'scalar and d': ('-BHT1', '-BHTD'),
    'theta': ('BHTK', '-BHTK'), 'constant theta': ('HK', '-H1'), 'complex bank': ('HKD', '-BHTK', '-HD', '-HKD'),
    'constant bank': ('HKD', '-HKD', '-HD'), 'constant modes': ('HK', '-HK'),
    'log_o': ('-HKD', '-BHTD'), 'log_o per token': ('-BHTKD',), 'constant e and s': ('-BHTK',),
    'sigmoid k': ('BHTK', 'H1D'), 'sigmoid d': ('BHTD', 'HKD'), 'exponential': ('+BHTD', '+HKD', '-H1'),
    'delta': ('BHTK', '~BHTK'), 'delta k': ('BHTK', '~BHTK', '-BHTK'), 'delta scalar': ('BHTK', '~BHTK', '-BHT1'),
    'delta constant': ('BHTK', '~BHTK', '-HK'),
}
_KEYS = {'complex bank': 'HKD2', 'constant bank': 'HKD2', 'constant modes': 'HKD', 'log_o': 'HKD',
         'constant e and s': 'HKD'}
SHAPES = {name: ('BHTD', _KEYS.get(name, 'BHTK'), 'BHTK' if name == 'log_o' else _KEYS.get(name, 'BHTK'), *others)
          for name, others in _OTHERS.items()}
NAMES = list(CALLS)
DELTA = [name for name in NAMES if name.startswith('delta')]
FULL_RANK = ['log_o', 'log_o per token', 'constant e and s', 'sigmoid k', 'sigmoid d', 'exponential']


def inputs(name: str, length: int, keys: int = 4, dim: int = 5, batch: int = 2, heads: int = 3,
           dtype: torch.dtype = torch.float64, decay: float = 1.0) -> list:
    """Return tensors for CALLS[name], drawn in float64: step logs in (-decay, 0)."""
    g = torch.Generator().manual_seed(length + 100 * keys)
    sizes = dict(B=batch, H=heads, T=length, K=keys, D=dim, **{str(n): n for n in (1, 2)})

    def draw(shape):
        size = [sizes[x] for x in shape if x in sizes]
        if shape[0] in '-+':
            return torch.rand(size, generator=g, dtype=torch.float64) * (-decay if shape[0] == '-' else 1)
        x = torch.randn(size, generator=g, dtype=torch.float64)
        return F.normalize(x, dim=-1) * 0.3 if shape[0] == '~' else x

    return [draw(shape).to(dtype) for shape in SHAPES[name]]


def call(name: str, tensors: list, backend: str, direction: str = 'forward', **options):
    return CALLS[name](*tensors, backend=backend, **DIRECTIONS[direction], **options)


def parts(output) -> list:
    """Return the output and the memory, if there is one, as real tensors."""
    outputs = output if isinstance(output, tuple) else (output,)
    return [torch.view_as_real(x) if x.is_complex() else x for x in outputs]


def values_and_gradients(name: str, tensors: list, backend: str, direction: str = 'forward', **options):
    """Return the outputs of a call and the gradients of their weighted sum."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    outputs = parts(call(name, tensors, backend, direction, **options))
    loss = sum(weighted_sum(x) for x in outputs)
    grads = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [x.detach() for x in outputs], [torch.zeros_like(x) if g is None else g for x, g in zip(tensors, grads)]
