"""What `subquad benchmark` measures: comparisons of operators and of models, and the presets made of them."""
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import torch

from ... import kernels
from ..common.cli import UserError
from ..engine import zoo
from . import baselines as field
from . import networks
from .attention_units import figure1
from .baselines import Grid
from .denoising import denoising
from .denoising import draw as draw_denoising
from .measure import copy, count_macs, floor, gemm, peak_memory, time_interleaved
from .records import figure, plot
from .tree_growth import tree_growth

GEMMS_A_ROUND = 5


def _rates(device: str, dtype: torch.dtype) -> Dict[str, Callable[[], Any]]:
    return {'gemm': gemm(device, dtype), 'copy': copy(device)}


def _working(calls: Mapping[str, Callable[[], Any]], first: str) -> Dict[str, Callable[[], Any]]:
    """The calls that run: one that fails is named with its error and left out, but for the first.

    Raises:
        UserError: the first one fails.
    """
    running = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:                   # whatever a compiler or another library makes of it
            message = f'{name}: {type(error).__name__}: {" ".join(str(error).split())[:200]}'
            if name == first:
                raise UserError(message) from error
            print(f'left out: {message}')
            continue
        running[name] = call
    return running


def _compared(names: Sequence[str], times: Mapping[str, Mapping[str, float]], faster: Mapping[str, float]
              ) -> List[Dict[str, Any]]:
    """How much faster the first is than each other one."""
    first = names[0]
    return [figure(f'{first} faster than {name}', times[name]['p50'] / times[first]['p50'] if name in times else None,
                   'x', at_least=faster.get(name)) for name in dict.fromkeys([*names[1:], *faster]) if name != first]


def operator(repeats: int, *, op: str, grid: Grid, batch: int = 1, heads: int = 8, dim: int = 32,
             dtype: str = 'float32', device: str = 'cpu', names: Sequence[str] = (), backward: bool = False,
             faster: Optional[Mapping[str, float]] = None, memory: Optional[float] = None,
             leaner: Optional[Mapping[str, float]] = None, bandwidth: Optional[float] = None) -> Dict[str, Any]:
    """An operator of ours against others, in turn; the first contestant is the one that the targets are for.

    Args:
        repeats: rounds of timing.
        op: operator.
        grid: height and width in tokens.
        batch, heads, dim: the other sizes.
        dtype, device: of q, k and v; step logs are float32.
        names: contestants (default: all that make sense here).
        backward: time the call and its gradients.
        faster: least speed-up over a contestant (times).
        memory: most memory of the first contestant (MB beyond inputs and output).
        leaner: least ratio of a contestant's memory to the first's (times).
        bandwidth: least fraction of the copy's bandwidth, by the bytes that must be moved.
    """
    kind = getattr(torch, dtype)
    make = field.OPERATORS[op].inputs
    inputs = make(batch, heads, grid, dim, kind, device)
    names = list(names) or field.available(op, inputs)
    functions = {name: field.operator_call(op, name) for name in names}
    tiny = make(1, 1, (2, 2), dim, kind, device)
    # Lazy initialisation is not an operator's memory; what is compiled for its shapes compiles in its first call.
    late = [name for name in names if name in ('compiled', 'flex')]
    early = _working({name: partial(functions[name], *tiny) for name in names if name not in late}, names[0])
    functions = {name: function for name, function in functions.items() if name in early or name in late}
    with torch.enable_grad() if backward else torch.no_grad():
        calls = {name: field.step(function, inputs) if backward else partial(function, *inputs)
                 for name, function in functions.items()}
        peaks = {name: peak_memory(call, True, device) for name, call in calls.items() if name in early}
        calls = _working(calls, names[0])
        peaks.update({name: peak_memory(call, True, device) for name, call in calls.items() if name not in peaks})
        macs = field.multiply_adds(op, inputs, backward)
        times = time_interleaved({**calls, **_rates(device, kind)}, repeats,
                                 {'gemm': GEMMS_A_ROUND, 'copy': GEMMS_A_ROUND}, device)
    first, moved = names[0], field.bytes_moved(op, inputs, backward)
    low = floor(macs, times['gemm']['p50'], device, moved, times['copy']['p50'])
    taken = times[first]['p50']
    results = _compared(names, times, faster or {})
    results += [figure(f'{first}, time over floor', taken / low['ms'], 'x'),
                figure(f'{first}, arithmetic', 2e-6 * macs / taken, 'GFLOP/s'),
                figure(f'{first}, memory moved', 1e-6 * moved / taken, 'GB/s'),
                figure(f'{first}, of the copy bandwidth', 1e-6 * moved / taken / low['copy_gbs'], '',
                       at_least=bandwidth)]
    results += [figure(f'peak memory, {name}', peak, 'MB', at_most=memory if name == first else None)
                for name, peak in peaks.items()]
    results += [figure(f'memory of {name} over {first}', _ratio(peaks.get(name), peaks[first]), 'x', at_least=least)
                for name, least in (leaner or {}).items()]
    return {'times_ms': times, 'peak_mb': peaks, 'floor': low, 'figures': results}


def _ratio(x: Optional[float], y: Optional[float]) -> Optional[float]:
    return x / y if x is not None and y else None


def scan_growth(repeats: int, *, sides: Sequence[int], heads: int = 8, dim: int = 32,
                exponent: float) -> Dict[str, Any]:
    """Time of the scan on growing square grids, and the exponent p of time ~ tokens^p from the first to the last.

    Args:
        repeats: rounds of timing.
        sides: grid sides in tokens, growing.
        exponent: target, at most.
    """
    scan = partial(kernels.polyline_scan, order='both', backend='portable')
    inputs = {f'{n}x{n}': (torch.randn(1, heads, n, n, dim), *(-torch.rand(1, heads, n, n) for _ in range(2)))
              for n in sides}
    # Short and long axes take different paths: the warm-up before the memory is measured takes both.
    scan(torch.randn(1, 1, 2, 65, 1), -torch.rand(1, 1, 2, 65), -torch.rand(1, 1, 2, 65))
    calls = {name: partial(scan, *tensors) for name, tensors in inputs.items()}
    first, last = list(calls)[0], list(calls)[-1]
    with torch.no_grad():
        peak = peak_memory(calls[last], beyond_output=True)
        times = time_interleaved(calls, repeats)
    slope = math.log(times[last]['p50'] / times[first]['p50']) / (2 * math.log(sides[-1] / sides[0]))
    return {'times_ms': times, 'peak_mb': {last: peak}, 'floor': None,
            'figures': [figure('growth exponent', slope, '', at_most=exponent),
                        figure(f'peak memory, {last}', peak, 'MB')]}


def figure10(repeats: int, *, sides: Sequence[int], dim: int = 64, device: str = 'cpu',
             dense_until: int = 96) -> Dict[str, Any]:
    """L x by the N x N mask and by Algorithm 1 on growing grids: the paper's Figure 10.

    Args:
        repeats: rounds of timing.
        sides: grid sides in tokens.
        dim: channels; one head.
        device: 'cpu' or 'cuda'.
        dense_until: the mask is made up to this side (its memory grows as side^4).
    """
    calls = {}
    scan = 'triton' if device == 'cuda' else 'portable'
    for side in sides:
        inputs = field.attention_inputs(1, 1, (side, side), dim, torch.float32, device)
        for name in (scan, 'dense'):
            if name == scan or side <= dense_until:
                calls[f'{name} {side}x{side}'] = partial(field.operator_call('polyline_scan', name), *inputs)
    with torch.no_grad():
        for name in (scan, 'dense'):
            field.operator_call('polyline_scan', name)(
                *field.attention_inputs(1, 1, (2, 65), dim, torch.float32, device))
        peaks = {name: peak_memory(call, True, device) for name, call in calls.items()}
        times = time_interleaved(calls, repeats, device=device)
    side = max(s for s in sides if s <= dense_until)
    ratio = times[f'dense {side}x{side}']['p50'] / times[f'{scan} {side}x{side}']['p50']
    return {'times_ms': times, 'peak_mb': peaks, 'floor': None,
            'figures': [figure(f'{scan} faster than dense at {side}x{side}', ratio, 'x')]
            + [figure(f'peak memory, {name}', peak, 'MB') for name, peak in peaks.items()]}


def model(repeats: int, *, names: Sequence[str], size: Grid, batch: int, dtype: str = 'float32', device: str = 'cpu',
          train: bool = False, over_floor: Optional[float] = None, memory: Optional[float] = None,
          faster: Optional[Mapping[str, float]] = None) -> Dict[str, Any]:
    """Models, a forward pass or a training step each, in turn; targets are for the first.

    Args:
        repeats: rounds of timing.
        names: timm names, each with @BACKEND or +compile if wanted.
        size: image height and width in pixels.
        batch: images.
        dtype, device: of the images; a training step in a half type runs under autocast.
        train: a training step in place of a forward pass.
        over_floor: most time over the floor (times).
        memory: most memory of the first model above the process with the models and their input (MB).
        faster: least speed-up over another name (times).
    """
    images = torch.randn(batch, 3, *size, device=device).to(getattr(torch, dtype))
    calls, weights = {}, None
    for name in names:                                 # networks that are the same get the same weights
        calls[name], own = networks.model_call(name, images, train, weights)
        weights = weights or own
    first = names[0]
    name, _, _ = networks.parse_model(first)
    small = images[:1] if zoo.size_options(name, size) else images[:1, :, :64, :64]
    networks.model_call(first, small, False)[0]()      # lazy initialisation is not the model's memory
    counted, _ = networks.model_call(f'{name}@portable', images, False)
    peaks = {first: peak_memory(calls[first], device=device)}
    calls = _working(calls, first)
    peaks.update({name: peak_memory(call, device=device) for name, call in calls.items() if name != first})
    # Each product of the forward pass has two in the backward pass. (Not counted there: torch's counter takes the
    # gradient of a depthwise convolution for that of a dense one.)
    macs = count_macs(counted) * (3 if train else 1)
    times = time_interleaved({**calls, 'gemm': gemm(device, images.dtype)}, repeats, {'gemm': GEMMS_A_ROUND}, device)
    low = floor(macs, times['gemm']['p50'], device)
    return {'times_ms': times, 'peak_mb': peaks, 'floor': low, 'figures': [
        *_compared(names, times, faster or {}),
        figure(f'{first}, time over floor', times[first]['p50'] / low['ms'], 'x', at_most=over_floor),
        *(figure(f'{name}, images', 1e3 * batch / times[name]['p50'], '/s') for name in calls),
        *(figure(f'peak memory, {name}', peak, 'MB', at_most=memory if name == first else None)
          for name, peak in peaks.items())]}


def detector(repeats: int, **options: Any) -> Dict[str, Any]:
    """`bench.detector.detector`, whose libraries are imported when it is asked for.

    Raises:
        UserError: they are not installed.
    """
    try:
        from .detector import detector as measure
    except ImportError as error:
        raise UserError(f'this preset needs MMDetection (make mm): {error}') from error
    return measure(repeats, **options)


@dataclass(frozen=True)
class Preset:
    """What is measured, how many rounds by default, the measurement (rounds -> record without environment), where, in
    how many processes, whose medians are kept, and what draws a picture of the record."""
    what: str
    repeats: int
    measure: Callable[[int], Dict[str, Any]]
    device: str = 'cpu'
    processes: int = 1
    draw: Optional[Callable[[Dict[str, Any], Path], None]] = None


_BASELINES = ('swin_tiny_patch4_window7_224', 'convnext_tiny', 'mobilevit_s', 'mobilevitv2_100',
              'vit_small_patch16_224', 'deit_tiny_patch16_224')
_ANY_SIZE = ('swin_tiny_patch4_window7_224', 'convnext_tiny', 'mobilevitv2_100')

PRESETS = {
    'polyline_attention-50x80': Preset(
        'polyline attention against the dense formula, 50 x 80 tokens, 8 heads of 32', 7,
        partial(operator, op='polyline_attention', grid=(50, 80), names=('portable', 'dense'), faster={'dense': 2.5},
                memory=300)),
    'polyline_attention-14x14': Preset(
        'the same on 14 x 14 tokens, batch 8', 30,
        partial(operator, op='polyline_attention', grid=(14, 14), batch=8, names=('portable', 'dense'),
                faster={'dense': 1})),
    'polyline_scan-growth': Preset(
        'polyline scan on 32 x 32 to 256 x 256 tokens: growth of its time', 15,
        partial(scan_growth, sides=(32, 64, 128, 256), exponent=1.1)),
    'ppma_tiny-800x1280': Preset(
        'PPMA-Tiny on one 800 x 1280 image, beside the floor', 7,
        partial(model, names=('ppma_tiny',), size=(800, 1280), batch=1, over_floor=5, memory=600)),
    'ppma_tiny-224': Preset(
        'PPMA-Tiny on eight 224 x 224 images, beside the floor', 15,
        partial(model, names=('ppma_tiny',), size=(224, 224), batch=8, over_floor=2.4)),
    'figure10': Preset(
        "L x by the mask and by Algorithm 1 (the paper's Figure 10), with a plot", 7,
        partial(figure10, sides=(16, 32, 48, 64, 96, 128, 192, 256), dense_until=64), draw=plot),
    'models-224': Preset(
        'PPMA-Tiny and models of its size and smaller, eight 224 x 224 images', 7,
        partial(model, names=('ppma_tiny', *_BASELINES), size=(224, 224), batch=8)),
    'models-800x1280': Preset(
        'PPMA-Tiny and models of its kind, one 800 x 1280 image', 3,
        partial(model, names=('ppma_tiny', *_ANY_SIZE), size=(800, 1280), batch=1)),
    'models-224-train': Preset(
        'the models of models-224, a training step on eight images', 5,
        partial(model, names=('ppma_tiny', *_BASELINES), size=(224, 224), batch=8, train=True)),
    'separable_attention-32x32': Preset(
        "separable attention in MobileViTv2-1.0's first block: 32 x 32 tokens of 128 channels, batch 8", 50,
        partial(operator, op='separable_attention', grid=(32, 32), batch=8, heads=1, dim=128,
                names=('portable', 'eager', 'matmul'), faster={'eager': 1, 'matmul': 1}), processes=5),
    'separable_attention-sequence': Preset(
        'the same on sequences of 1,024 tokens, where nothing is unfolded', 50,
        partial(operator, op='separable_attention', grid=(1, 1024), batch=8, heads=1, dim=128,
                names=('portable', 'eager', 'matmul'), faster={'eager': 1, 'matmul': 1}), processes=5),
    **{f'mobilevitv2_{width}-batch{batch}': Preset(
        f"MobileViTv2-{int(width) / 100:g} against timm's, the same weights, {batch} image(s) of 256 x 256",
        40 if batch == 1 else 8, partial(model, names=(f'subquad_mobilevitv2_{width}', f'mobilevitv2_{width}'),
                                         size=(256, 256), batch=batch, faster={f'mobilevitv2_{width}': 0.97}),
        processes=5) for width in ('050', '100', '200') for batch in (1, 8)},
    **{f'{theirs}-256': Preset(
        f"MobileViTv2 against MobileViT (v1) of about its size, timm's {theirs}, one image of 256 x 256", 40,
        partial(model, names=(f'subquad_mobilevitv2_{width}', theirs), size=(256, 256), batch=1))
       for width, theirs in (('050', 'mobilevit_xxs'), ('075', 'mobilevit_xs'), ('100', 'mobilevit_s'))},
    'figure1': Preset(
        "the attention units of MobileViTv2's Figure 1 at 256 tokens, and their time over the number of tokens", 30,
        partial(figure1, tokens=(64, 128, 256, 512, 1024, 2048, 4096)), draw=plot),
    'quadtree_solve-growth': Preset(
        'quad-tree solves of 50,176 tokens of 64 channels, in 64 images of 28 x 28 to one of 224 x 224', 15,
        partial(tree_growth, sides=(28, 56, 112, 224), tokens=224 * 224), processes=3),
    'myo_tiny-224': Preset(
        'Myo-Tiny and PPMA-Tiny on eight 224 x 224 images', 7,
        partial(model, names=('myo_tiny', 'ppma_tiny'), size=(224, 224), batch=8)),
    'mask-rcnn_ppma-t-800x1280': Preset(
        'Mask R-CNN on PPMA-Tiny, inference on one 800 x 1280 image: memory, and the share of the backbone', 3,
        partial(detector, config='mask-rcnn_ppma-t_fpn_1x_coco', size=(800, 1280))),
    'denoising': Preset(
        'denoising by one linear tree solve over the pixels in Morton, snake, raster and random order', 2,
        denoising, draw=draw_denoising),
    'gpu-separable_attention-32x32': Preset(
        "separable attention in MobileViTv2-1.0's first block, batch 128, bfloat16", 50,
        partial(operator, op='separable_attention', grid=(32, 32), batch=128, heads=1, dim=128, dtype='bfloat16',
                device='cuda', names=('triton', 'compiled', 'eager'), bandwidth=0.75), 'cuda'),
    'gpu-separable_attention-32x32-train': Preset(
        'the same with gradients', 50,
        partial(operator, op='separable_attention', grid=(32, 32), batch=128, heads=1, dim=128, dtype='bfloat16',
                device='cuda', backward=True, names=('triton', 'compiled', 'eager')), 'cuda'),
    'gpu-mobilevitv2_100-256': Preset(
        "MobileViTv2-1.0 on 128 images, bfloat16, against timm's", 20,
        partial(model, names=('subquad_mobilevitv2_100', 'mobilevitv2_100', 'subquad_mobilevitv2_100+compile',
                              'mobilevitv2_100+compile'), size=(256, 256), batch=128, dtype='bfloat16', device='cuda',
                faster={'mobilevitv2_100': 1.3}), 'cuda'),
    'gpu-polyline_attention-50x80': Preset(
        'the fused kernel against PyTorch attention, 50 x 80 tokens, 8 heads of 32, bfloat16', 50,
        partial(operator, op='polyline_attention', grid=(50, 80), dtype='bfloat16', device='cuda',
                names=('triton', 'sdpa', 'flex', 'compiled', 'dense'), faster={'sdpa': 5, 'flex': 1.5},
                leaner={'sdpa': 20}), 'cuda'),
    'gpu-polyline_attention-50x80-train': Preset(
        'the same with gradients', 50,
        partial(operator, op='polyline_attention', grid=(50, 80), dtype='bfloat16', device='cuda', backward=True,
                names=('triton', 'sdpa', 'flex', 'compiled')), 'cuda'),
    'gpu-crisscross_attention-56x56': Preset(
        "criss-cross attention of PPMA-Tiny's first stage, batch 64, bfloat16, with gradients", 50,
        partial(operator, op='crisscross_attention', grid=(56, 56), batch=64, heads=4, dim=16, dtype='bfloat16',
                device='cuda', backward=True, names=('triton', 'compiled', 'dense')), 'cuda'),
    'gpu-polyline_scan-56x56': Preset(
        'the fused scan beside the copy bandwidth, 56 x 56 x 64 channels, batch 64', 50,
        partial(operator, op='polyline_scan', grid=(56, 56), batch=64, heads=1, dim=64, device='cuda',
                names=('triton', 'portable', 'dense'), bandwidth=0.6), 'cuda'),
    'gpu-figure10': Preset(
        "the paper's Figure 10 on a GPU, with a plot", 30,
        partial(figure10, sides=(16, 32, 48, 64, 96, 128, 192, 256), device='cuda', dense_until=128), 'cuda',
        draw=plot),
    'gpu-quadtree_solve-56x56': Preset(
        'the quad-tree solve of 56 x 56 tokens, 64 channels, batch 64, bfloat16', 50,
        partial(operator, op='quadtree_solve', grid=(56, 56), batch=64, heads=4, dim=16, dtype='bfloat16',
                device='cuda', names=('triton', 'portable', 'loop'), bandwidth=0.5), 'cuda'),
    'gpu-quadtree_solve-56x56-train': Preset(
        'the same with gradients', 50,
        partial(operator, op='quadtree_solve', grid=(56, 56), batch=64, heads=4, dim=16, dtype='bfloat16',
                device='cuda', backward=True, names=('triton', 'portable', 'loop')), 'cuda'),
    'gpu-ppma_tiny-224': Preset(
        'PPMA-Tiny on 128 images, bfloat16, kernels against the compiled portable path', 20,
        partial(model, names=('ppma_tiny@triton+compile', 'ppma_tiny@portable+compile', 'ppma_tiny@triton'),
                size=(224, 224), batch=128, dtype='bfloat16', device='cuda',
                faster={'ppma_tiny@portable+compile': 2}), 'cuda'),
    'gpu-ppma_tiny-224-train': Preset(
        'the same, a training step', 20,
        partial(model, names=('ppma_tiny@triton+compile', 'ppma_tiny@portable+compile', 'ppma_tiny@triton'),
                size=(224, 224), batch=128, dtype='bfloat16', device='cuda', train=True,
                faster={'ppma_tiny@portable+compile': 2}), 'cuda'),
    'gpu-models-800x1280': Preset(
        'PPMA-Tiny and models of its kind on 800 x 1280 images, bfloat16', 20,
        partial(model, names=('ppma_tiny', *_ANY_SIZE), size=(800, 1280), batch=8, dtype='bfloat16', device='cuda'),
        'cuda'),
}
# Those with a target in time or memory: what `subquad benchmark` measures unless told otherwise.
DEFAULTS: List[str] = ['polyline_attention-50x80', 'polyline_attention-14x14', 'polyline_scan-growth',
                       'ppma_tiny-800x1280', 'ppma_tiny-224', 'separable_attention-32x32',
                       'separable_attention-sequence', 'quadtree_solve-growth',
                       *(name for name in PRESETS if name.startswith('mobilevitv2_'))]
GPU_DEFAULTS: List[str] = [name for name, preset in PRESETS.items() if preset.device == 'cuda']
