"""Reports of machine code: loops, barriers and layouts of products of kernels compiled ahead of time."""
import json

import pytest

pytest.importorskip('triton')

from lab import machine_code

# A product of two tiles in a loop over `count` pairs of tiles, with a maximum over columns.
KERNEL = '''
import dataclasses, json
import torch
import triton
import triton.language as tl
from lab import aot, machine_code

@triton.jit
def _chain_kernel(x, y, out, count, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    a = tl.load(x + row * BLOCK + column)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for n in range(count):
        b = tl.load(y + n * BLOCK * BLOCK + row * BLOCK + column)
        p = tl.dot(a, tl.trans(b))
        p = tl.exp2(p - tl.max(p, 1)[:, None])
        total += tl.dot(p.to(b.dtype), b)
    tl.store(out + row * BLOCK + column, total)

x = torch.empty(3, 32, 32, dtype=torch.bfloat16, device='meta')
found = {}
for target, block, warps in LAUNCHES:
    with aot.compiling_for(target) as kernels:
        _chain_kernel[(1,)](x, x, x.float(), 3, BLOCK=block, num_warps=warps, num_stages=1)
    code = machine_code.analyze(kernels[0])
    found[f'{target} {block} {warps}'] = dict(dataclasses.asdict(code), per_item=code.per_item(block * block),
                                              worst=code.duplicates())
print(json.dumps(found))
'''


@pytest.fixture
def compiled(python, tmp_path):
    """Compile the kernel, from a file, because Triton reads its source, for (target, tile, warps)."""
    def compile_(*launches):
        path = tmp_path / 'kernel.py'
        path.write_text(f'LAUNCHES = {launches!r}\n{KERNEL}')
        done = python(f'import runpy; runpy.run_path({str(path)!r})', TRITON_INTERPRET='0')
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout).values())
    return compile_


def test_finds_loops_barriers_and_duplicates_of_warps(compiled):
    """Two warps cover a tile of 32 rows once, four cover it twice, and four beside each other share a row."""
    once, twice, small = compiled(('cuda:90', 32, 2), ('cuda:90', 32, 4), ('cuda:80', 16, 1))
    for code in (once, twice, small):
        assert code['name'] == 'chain' and code['stack'] == 0 and 16 < code['registers'] <= 255
        (loop,) = code['loops']
        assert loop['innermost'] and 0 < loop['instructions'] < code['instructions']
        assert loop['counts']['HMMA'] and loop['counts']['MUFU']
        assert sum(loop['counts'].values()) == loop['instructions']
        warps = code['warps']
        assert code['per_item'] == [loop['instructions'] * 32 * warps / code['constants']['BLOCK'] ** 2]
        assert [product['layout'] for product in code['products']] == ['nvidia_mma'] * 2
    assert [p['shape'] for p in once['products']] == [[32, 32, 32]] * 2
    assert (once['worst'], twice['worst'], small['worst']) == (1, 2, 1)
    assert twice['per_item'][0] > 1.5 * once['per_item'][0]


@pytest.mark.slow
def test_reads_assembly_of_amd_gpus(compiled):
    code, = compiled(('hip:gfx942', 32, 4))
    assert code['threads'] == 64 and code['registers'] > 16 and code['stack'] == 0
    assert any(loop['innermost'] and loop['counts'].get('v_mfma') for loop in code['loops'])
    assert {product['layout'] for product in code['products']} == {'amd_mfma'} and code['worst'] > 1


@pytest.mark.parametrize('layout, shape, warps, duplicates', [
    ('nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [1, 4], instrShape = [16, 8]}>', '16x16', (1, 4),
     2),
    ('nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>', '64x64',
     (4, 1), 1),
    ('amd_mfma<{version = 3, warpsPerCTA = [8, 1], instrShape = [32, 32, 2], isTransposed = true}>', '32x32', (8, 1),
     8),
    ('amd_mfma<{version = 3, warpsPerCTA = [2, 1], tilesPerWarp = [2, 1], instrShape = [16, 16, 16]}>', '32x32',
     (2, 1), 2),
    ('blocked<{sizePerThread = [2, 2], threadsPerWarp = [2, 16], warpsPerCTA = [8, 1], order = [1, 0]}>', '32x32',
     (8, 1), 1),
    ('blocked<{sizePerThread = [2, 2], threadsPerWarp = [2, 16], warpsPerCTA = [8, 1], order = [1, 0]}>', '16x16',
     (8, 1), 4),
    ('amd_wmma<{version = 2, isTranspose = true}>', '32x32', (), None),
])
@pytest.mark.parametrize('operation', [
    'tt.dot %a, %b, %c : tensor<{m}x64xbf16, #ttg.dot_op<{{opIdx = 0, parent = #mma}}>> * tensor<64x{n}xbf16, #x>',
    'ttng.warp_group_dot %a, %b, %c : !ttg.memdesc<{m}x64xbf16, #shared, #smem> * !ttg.memdesc<64x{n}xbf16, #shared>',
])
def test_duplicates_follow_from_the_layout(layout, shape, warps, duplicates, operation):
    m, n = shape.split('x')
    text = f'#mma = #ttg.{layout}\n  %p = {operation.format(m=m, n=n)} -> tensor<{shape}xf32, #mma> loc(#loc9)\n'
    product, = machine_code.products(text)
    assert product == machine_code.Product((int(m), int(n), 64), layout.split('<')[0], warps, duplicates)
