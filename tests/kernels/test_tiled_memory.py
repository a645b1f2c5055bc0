"""Images that are larger than the memory: peak resident memory, and values that are known in closed form.

Each test runs in a process of its own, which reads and writes memory-mapped files band by band. The sizes here are
those of CI; the slow tests are 8,192 x 8,192.
"""
import json

import pytest

# Sizes of a side, and bounds of the peak in MiB. The package itself takes a few hundred.
SMALL = pytest.param(1024, 1000, id='1024')
LARGE = pytest.param(8192, 4096, id='8192', marks=pytest.mark.slow)

BEGIN = '''
import json, sys
import numpy as np
import torch
from subquad.kernels.tiling import *
torch.set_num_threads(1)
side, channels, folder = {side}, 4, {folder!r}

def file(name, shape, dtype=np.float32):
    return np.lib.format.open_memmap(f'{{folder}}/{{name}}.npy', 'w+', dtype, shape)

def wave(rate, start, stop, width=side):
    """A function of the place that no band repeats, in [0, 1]: (rows, width)."""
    return (torch.arange(start * width, stop * width, dtype=torch.float64) * rate).sin().square().reshape(-1, width)
'''
END = '''
with open('/proc/self/status') as status:
    peak, = (int(line.split()[1]) / 1024 for line in status if line.startswith('VmHWM'))
print(json.dumps(dict(peak=peak, error=float(error))))
'''

# One token is not zero: the result is a column of the mask, the product of two decays.
POLYLINE = '''
row, column = side // 3, side // 2 + 1

def log_alpha(start, stop):
    return -wave(0.37, start, stop).float()[None, None] / side * 8

def log_beta(start, stop):
    return -wave(0.73, start, stop).float()[None, None] / side * 8

x = file('x', (1, 1, side, side, channels))
x[0, 0, row, column] = np.arange(1, channels + 1)
out = file('out', x.shape)
polyline_scan_tiled(x, log_alpha, log_beta, out, paths='both', size=(side, side))

places, sums, total = (0, row - 70, row, row + 1, side - 1), {}, 0
for n in range(side):                                # the logs of all rows would take more memory than the scan
    total = total + log_beta(n, n + 1)[0, 0, 0].double()
    if n in places:
        sums[n] = total
error = 0.0
for i in places:
    rows = {n: log_alpha(n, n + 1)[0, 0, 0].double().cumsum(0) for n in (i, row)}
    v2h = -(sums[i][column] - sums[row][column]).abs() - (rows[i] - rows[i][column]).abs()
    h2v = -(rows[row] - rows[row][column]).abs() - (sums[i] - sums[row]).abs()
    expected = (v2h.exp() + h2v.exp())[:, None] * torch.arange(1, channels + 1)
    error = max(error, float((torch.from_numpy(out[0, 0, i]) - expected).abs().max() / channels))
'''

# A constant decay in raster order: the response to one token is exp(-rate * distance), in both directions.
EOS = '''
place, rate = side * side // 3 + 5, 8 / side
i = file('i', (1, 1, side * side, channels))
i[0, 0, place] = np.arange(1, channels + 1)
out = file('out', i.shape)
ones = lambda start, stop: torch.ones(1, 1, stop - start, 2)
eos_elementwise_tiled(i, ones, ones, out, log_o_k=torch.full((1, 2), -rate), bidirectional=True, segment=side * 8)
error = 0.0
for distance in (0, 1, -1, 63, -200, side + 1, -side - 7, 100 * side):
    expected = 2 * np.exp(-rate * abs(distance)) * np.arange(1, channels + 1)
    error = max(error, abs(out[0, 0, place + distance] - expected).max() / (2 * channels))
'''

# The matrix of the Laplacian is symmetric and its inverse has row sums of 1: it keeps the sum of the values.
TREE = '''
from subquad.kernels.trees import quadtree_levels
levels = quadtree_levels(side, side)
values = [file(f'u{n}', (1, 1, *level[:2], channels)) for n, level in enumerate(levels)]
out = [file(f'x{n}', value.shape) for n, value in enumerate(values)]
for value in values:
    for start in range(0, value.shape[2], 64):
        stop = min(start + 64, value.shape[2])
        value[0, 0, start:stop] = wave(0.11, start, stop, value.shape[3])[..., None] * np.arange(1, channels + 1)

def edge(n, level):
    return lambda start, stop: 4.0 ** n * wave(0.57 + n, start, stop, level.width).float()[None, None]

edges = [edge(n, level) for n, level in enumerate(levels[:-1])]
quadtree_solve_tiled(values, edges, out)
sums = [sum(x[0, 0, n].sum(0, dtype=np.float64) for x in arrays for n in range(x.shape[2])) for arrays in (values, out)]
error = abs(sums[1] / sums[0] - 1).max()
row = side // 2 - 1                                                      # a row of T x = u at a border of bands
for n in (row, row + 1):
    x, u, above = (torch.from_numpy(y.copy()) for y in (out[0][0, 0, n], values[0][0, 0, n], out[1][0, 0, n // 2]))
    weight = edges[0](n, n + 1)[0, 0, 0, :, None]
    residual = x + weight * (x - above.repeat_interleave(2, 0)) - u
    error = max(error, float(residual.abs().max() / channels))
'''


@pytest.mark.parametrize('side, bound', [SMALL, LARGE])
@pytest.mark.parametrize('script', [pytest.param(POLYLINE, id='polyline'), *(
    pytest.param(script, id=name, marks=pytest.mark.slow) for name, script in (('eos', EOS), ('tree', TREE)))])
def test_peak_memory_and_values(script, side, bound, python, tmp_path):
    done = python(BEGIN.format(side=side, folder=str(tmp_path)) + script + END, fresh=True, OMP_NUM_THREADS='1')
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found['error'] <= 1e-5
    assert found['peak'] <= bound
