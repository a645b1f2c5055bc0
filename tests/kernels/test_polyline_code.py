"""Machine code of the kernels of polyline attention, compiled ahead of time for the head size of PPMA."""
import json

import pytest

pytest.importorskip('triton')
pytest.importorskip('lab.machine_code')

SCRIPT = '''
import json, torch
from lab import machine_code
from subquad.kernels import aot
from subquad.kernels.polyline_attention import triton

found = []
for height, width in {grids!r}:
    q, k, v, grad = (torch.empty(2, 4, height, width, 32, dtype=torch.bfloat16, device='meta') for _ in range(4))
    sums = torch.empty(2, 4, height, width, device='meta')
    with aot.compiling_for('{target}') as compiled:
        saved = triton.forward(q, k, v, sums, sums, 'additive', 'both', True)
        triton.backward(grad, q, k, v, sums, sums, *saved, 'additive', 'both')
    for code in map(machine_code.analyze, compiled):
        if 'ROWS' in code.constants:
            pairs = code.constants['ROWS'] * code.constants['KEY_ROWS'] * code.constants['COLS'] ** 2
            found.append([code.name, max(code.per_item(pairs)) if {count} else 0, code.stack, code.duplicates()])
print(json.dumps(found))
'''
AT_MOST = {'polyline_attention_fwd': 20, 'polyline_attention_bwd_query': 30, 'polyline_attention_bwd_key': 30}


def _compiled(python, target, grids, count):
    done = python(SCRIPT.format(target=target, grids=grids, count=count), TRITON_INTERPRET='0')
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_instructions_of_a_pair(python):
    """Loops take few thread-instructions a pair, no register spills, and no warp repeats the work of another."""
    found = _compiled(python, 'cuda:90', [(50, 80)], True)
    assert {name for name, *_ in found} == set(AT_MOST)
    for name, instructions, stack, duplicates in found:
        assert 0 < instructions <= AT_MOST[name] and stack == 0 and duplicates == 1, (name, instructions, stack)


@pytest.mark.slow
@pytest.mark.parametrize('target', ['cuda:80', 'hip:gfx942'])
def test_other_targets(target, python):
    found = _compiled(python, target, [(14, 14)], False)
    assert {name for name, *_ in found} == set(AT_MOST)
    assert [entry for entry in found if entry[2] and target.startswith('cuda')] == []
