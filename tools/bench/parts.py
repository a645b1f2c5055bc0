"""Where the time of a model goes: a table by part, from torch.profiler."""
import re
from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import wraps
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from ...kernels.dispatch import OPERATORS
from .measure import time_interleaved

OVERHEAD, OTHER, COPIES = 'overhead of calls', 'other', 'copies'
# What happens inside these belongs to them, copies too.
_WHOLE = ('stem', 'attention')
_STEM = re.compile(r'(conv_)?stem|patch_embed')
# The parts of operators by their names, without namespace, final underscore and '_backend'.
_PARTS = [(re.compile(pattern), part) for part, pattern in [
    ('stem', r'stem'),
    ('products', r'linear|_linear_pointwise|addmm|mm|product_native_fwd|onednn_linear_fwd'),
    ('attention', r'.*attention.*|matmul|bmm|baddbmm|einsum|_?softmax|(polyline|eos|quadtree|rotary)_.*|tree_solve.*'),
    ('depthwise convolutions', r'depthwise_conv.*'),
    ('norms', r'(native_)?(layer|batch|group|instance)_norm|.*rms_norm|linalg_vector_norm'),
    ('activations', r'gelu|silu|mish|p?relu6?|leaky_relu|c?elu|hard(tanh|swish|sigmoid)|(log_)?sigmoid|tanh|softplus'),
    (COPIES, r'copy|clone|_to_copy|cat|stack|(constant_)?pad(_nd)?|roll|index(_select)?|gather|fill|zero'),
    ('elementwise', r'add|r?sub|mul|div|neg|exp|log|pow|r?sqrt|addcmul|lerp|clamp(_min|_max)?|where|maximum|minimum'),
    # These compute nothing: their time is that of the call.
    (OVERHEAD, r'(un)?squeeze|_?(un)?flatten|_?(unsafe_)?view|_?reshape(_alias)?|permute|t|numpy_T|transpose|to'),
    (OVERHEAD, r'movedim|expand|select|slice|narrow|chunk|unbind|split(_with_sizes)?|as_strided|alias|detach'),
    (OVERHEAD, r'contiguous|(new_)?empty(_.*)?|item|promote_types|result_type|dropout')]]
_CONVOLUTION = re.compile(r'conv2d|convolution|_convolution_pointwise')


class Part(NamedTuple):
    """Milliseconds of a pass, the number of calls of operators in it, and milliseconds by operator."""
    ms: float
    calls: int
    operators: Dict[str, float]


def part_of(name: str, shapes: Sequence[Sequence[int]] = ()) -> Optional[str]:
    """Return the part that an operator belongs to, or None.

    Args:
        name: as the profiler writes it, such as 'aten::conv2d'.
        shapes: those of its arguments.
    """
    short = re.sub(r'_$', '', name.rpartition('::')[2])
    if _CONVOLUTION.fullmatch(short) and len(shapes) > 1 and len(shapes[1]) == 4:
        outputs, inputs, *window = shapes[1]
        return ('depthwise convolutions' if inputs == 1 < outputs else
                'products' if window == [1, 1] else 'dense convolutions')
    return next((part for pattern, part in _PARTS if pattern.fullmatch(short)), None)


def profile_parts(call: Callable[[], Any], repeats: int, device: str = 'cpu') -> Tuple[Dict[str, Part], float]:
    """Profile what `networks.model_call` returns. The time of a part is that of its kernels on a GPU.

    The parts are those of the pass of median length. The overhead of calls is what remains of its time: Python,
    dispatch and views.

    Returns:
        The parts, whose milliseconds sum to those of the pass, and the milliseconds of a pass without the profiler.
    """
    def finished() -> None:
        call()
        if device == 'cuda':
            torch.cuda.synchronize()

    finished()                                                       # tables and compiled kernels are kept from here on
    plain = time_interleaved({'call': finished}, repeats)['call']['p50']
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == 'cuda' else [])]
    with _named(call.network), profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(repeats):
            with record_function('whole'):
                finished()
    passes = [event for event in profiler.events() if event.name == 'whole' and event.device_type.name == 'CPU']
    whole = sorted(passes, key=lambda event: event.cpu_time_total)[repeats // 2]
    times = f'self_{"device" if device == "cuda" else "cpu"}_time_total'
    operators, calls = defaultdict(Counter), Counter()

    def add(event: Any, part: Optional[str] = None, name: str = '') -> None:
        """Give the time of an event and of those within it to parts. The outermost known operator counts."""
        own = part_of(event.name, event.input_shapes) or OTHER
        if part is None or part == OTHER != own or own == COPIES and part not in (*_WHOLE, COPIES):
            part, name = own, event.name
            calls[part] += 1
        if part != OVERHEAD:
            operators[part][name] += getattr(event, times) / 1e3
        for child in event.cpu_children:
            add(child, part, name)

    for event in whole.cpu_children:
        add(event)
    parts = {part: Part(sum(found.values()), calls[part], found) for part, found in operators.items()}
    rest = whole.cpu_time_total / 1e3 - sum(part.ms for part in parts.values())
    return {**parts, OVERHEAD: Part(rest, calls[OVERHEAD], {})}, plain


def _named(network: nn.Module) -> ExitStack:
    """Give the stem and the operators of this package names in a profile.

    Forward hooks would not do: prepared modules with hooks run whole batches.
    """
    stack = ExitStack()
    for name, module in network.named_children():
        if _STEM.fullmatch(name):
            stack.enter_context(patch.object(module, 'forward', _recorded('stem', module.forward)))
    for name, operator in OPERATORS.items():
        stack.enter_context(patch.dict(operator.implementations, {
            backend: _recorded(f'subquad::{name}', run) for backend, run in operator.implementations.items()}))
    return stack


def _recorded(name: str, run: Callable) -> Callable:
    @wraps(run)
    def recorded(*args, **kwargs):
        with record_function(name):
            return run(*args, **kwargs)
    return recorded


def rows(parts: Dict[str, Part]) -> List[Tuple[str, str, str, str, str]]:
    """Return the rows (part, ms, percent, calls, slowest operators) of a table, longest parts first."""
    whole = sum(part.ms for part in parts.values())
    return [(name, f'{part.ms:.2f}', f'{part.ms / whole:.1%}', str(part.calls), ', '.join(
        f'{operator} {ms:.2f}' for operator, ms in Counter(part.operators).most_common(3)))
        for name, part in sorted(parts.items(), key=lambda item: -item[1].ms)]
