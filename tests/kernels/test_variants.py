"""Kernels are compiled for a few variants, not again for each size of image: a detector sees hundreds of sizes."""
import json

import pytest

pytest.importorskip('triton')

# Calls a model's operators on meta tensors with the shapes and layouts of its stages, for detector-sized images, and
# counts the keys under which Triton looks for compiled kernels. Nothing is compiled or launched.
SCRIPT = '''
import collections, json, random, sys
import torch, triton
from triton.runtime.jit import compute_cache_key
import subquad
from lab import aot
from subquad.kernels import (crisscross_attention, eos_elementwise, eos_matmul, polyline_attention, quadtree_attention,
                             quadtree_solve, separable_attention)
from subquad.kernels.eos_scan import DecayGenerator
from subquad.kernels.trees.grid import quadtree_levels, third_of_coarsest_cell

# Channels, heads and stride of the stages of the tiny models.
STAGES = ((64, 4, 4), (128, 4, 8), (256, 8, 16), (512, 16, 32))


def detector_sizes(count):
    """Draw sizes as detectors do in training: the short side from 480 to 800, the long one up to 1333, padded to 32."""
    random.seed(0)
    for _ in range(count):
        short = random.choice(range(480, 801, 32))
        size = [-(-n // 32) * 32 for n in (short, min(int(short * random.uniform(1, 1.8)), 1333))]
        yield tuple(size if random.random() < 0.75 else size[::-1])


def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device='meta', requires_grad=training)


def heads_first(height, width, heads, *channels, dtype=torch.bfloat16):
    """A tensor (2, heads, height, width, *channels) that is a view of channels-last tokens."""
    x = new(2, height, width, heads, *channels, dtype=dtype)
    return x.permute(0, 3, 1, 2, 4) if channels else x.permute(0, 3, 1, 2)


def ppma(height, width):
    for n, (channels, heads, stride) in enumerate(STAGES):
        grid = height // stride, width // stride, heads
        q, k, v = (heads_first(*grid, channels // heads) for _ in range(3))
        logs = [heads_first(*grid) for _ in range(2)]
        yield (crisscross_attention if n < 2 else polyline_attention)(q, k, v, *logs)


def myo(height, width):
    for channels, heads, stride in STAGES:
        size = height // stride, width // stride
        for shift in ((0, 0), third_of_coarsest_cell(*size)):             # layers take turns
            levels = quadtree_levels(*size, shift=shift)
            values = [heads_first(*level[:2], heads, channels // heads) for level in levels]
            edges = [heads_first(*level[:2], heads, dtype=torch.float32) for level in levels[:-1]]
            yield quadtree_solve(values, edges, shift=shift)[0]
            if not training:
                q, k, v = (heads_first(*size, heads, n) for n in (8, 8, channels // heads))
                yield quadtree_attention(q, k, v, new(12, 2, 2, heads), shift=shift)


def mobilevitv2(height, width):
    for channels, stride in ((128, 8), (192, 16), (256, 32)):
        grid = height // stride, width // stride
        yield separable_attention(new(2, *grid, 1), new(2, *grid, channels), new(2, *grid, channels), patch_size=2)


def lcsm(height, width):
    for channels, _, stride in STAGES:
        size = height // stride, width // stride
        for lines, length in (size, size[::-1]):
            i, e, s, log = (new(2 * lines, length, channels // 32, c, dtype=dtype).transpose(1, 2)
                            for c, dtype in zip((32, 16, 16, 16), (torch.bfloat16,) * 3 + (torch.float32,)))
            yield eos_elementwise(i, e, s, log_o_k=log, bidirectional=True)


def lcsm_loops(height, width):
    """The loops over tokens of one stage, in both directions along the raster."""
    for channels, heads, stride in STAGES[1:2]:
        def tokens(size, dtype=torch.bfloat16):
            return new(2, height // stride * (width // stride), heads, size, dtype=dtype).transpose(1, 2)
        i, (e, s, a, b, z) = tokens(channels // heads), (tokens(16) for _ in range(5))
        yield eos_matmul(i, e, s, a=a, b=b, gk=tokens(16, torch.float32), bidirectional=True)
        yield eos_elementwise(i, e, s, generator=DecayGenerator(z, new(heads, 16, channels // heads), 'k'),
                              bidirectional=True)


def look_up(self, *args, grid, warmup, **options):
    _, keys, _, _, binder = self.device_caches[0]
    _, specialization, options = binder(*args, debug=False, **options)
    variants[self.__name__].add(compute_cache_key(keys, specialization, options))


model, sizes, result = globals()[sys.argv[1]], sorted(set(detector_sizes(80))), {}
with aot.compiling_for('cuda:90'):
    triton.runtime.jit.JITFunction.run = look_up
    for training in (False, True):
        variants = collections.defaultdict(set)
        for size in sizes:
            for y in model(*size):
                if training:
                    y.backward(torch.empty_like(y))             # as channels-last layers after it pass it on
        result['training' if training else 'evaluation'] = {name: len(keys) for name, keys in variants.items()}
print(json.dumps({**result, 'sizes': len(sizes)}))
'''


@pytest.mark.slow
@pytest.mark.parametrize('model', ['ppma', 'myo', 'mobilevitv2', 'lcsm', 'lcsm_loops'])
def test_detectors_need_few_variants(model, python):
    done = python(SCRIPT.replace('sys.argv[1]', repr(model)), TRITON_INTERPRET='0')
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts['sizes'] == 72
    assert 0 < sum(counts['evaluation'].values()) <= sum(counts['training'].values()) <= 16, counts
