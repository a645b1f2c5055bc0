"""The sanitizer finds nothing in the kernels of the package, and each kind of fault in the kernels below."""
import re

import pytest
import torch

pytest.importorskip('triton')

import triton
import triton.language as tl

from lab import sanitize
from lab.gpu_checks import Case
from lab.large_strides import Call, sparse_memory
from subquad.kernels.common import launch

if not launch.interpreted():
    pytest.skip('the sanitizer needs the interpreter', allow_module_level=True)

LENGTH, BLOCK = 37, 16
BLOCKS = triton.cdiv(LENGTH, BLOCK)


@triton.jit
def _double_kernel(x, y, length, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + n, mask=n < length if MASKED else n >= 0)
    tl.store(y + n, 2 * value, mask=n < length)


@triton.jit
def _overlapping_kernel(x, y, length, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(y + n, 2 * tl.load(x + n, mask=n < length), mask=n < length)


@triton.jit
def _carrying_kernel(x, y, length):
    n = tl.program_id(0)
    before = tl.load(y + n - 1, mask=n > 0, other=0.)
    tl.store(y + n, 2 * tl.load(x + n) + 0 * before)


@triton.jit
def _adding_kernel(x, y, length, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y + 0 * n, tl.load(x + n, mask=n < length, other=0.), mask=n < length)


@triton.jit
def _rows_kernel(x, y, stride, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(y + tl.program_id(0), 2 * tl.load(x + row * stride))


def _doubled(run, whole=True):
    """An operator that doubles x, with a kernel that run(x, y) launches. Its gradient is 0."""
    def call(x, backend):
        y = 2 * x.detach()
        if backend == 'triton':
            y = torch.empty_like(y) if whole else torch.zeros_like(y)
            run(x.detach(), y)
        return y + 0 * x
    return call


def _findings(run, length=LENGTH, **options):
    case = Case('planted', _doubled(run, **options), [torch.randn(length)])
    return list(sanitize.check(case).findings)


def _double(x, y, masked=True, blocks=BLOCKS):
    _double_kernel[(blocks,)](x, y, len(x), MASKED=masked, BLOCK=BLOCK)


def test_a_correct_kernel_has_no_findings():
    assert _findings(_double) == []


def test_a_missing_mask_is_found():
    assert _findings(lambda x, y: _double(x, y, masked=False)) == [
        '_double_kernel loads outside of a tensor of shape (37,), first at element 37']


def test_an_overrun_into_another_tensor_is_found():
    """Both tensors lie in one storage, and the values are right."""
    def run(x, y):
        both = torch.cat([x, torch.zeros(BLOCK)])
        _double(both[:LENGTH], y, masked=False)
    assert 'loads outside of a tensor of shape (37,)' in _findings(run)[0]


def test_an_unwritten_tail_is_found():
    assert _findings(lambda x, y: _double(x, y, blocks=BLOCKS - 1))[0] == 'the output is not finite'


def test_two_programs_that_store_the_same_value_are_found():
    assert _findings(lambda x, y: _overlapping_kernel[(BLOCKS,)](x, y, len(x), BLOCK=BLOCK)) == [
        '_overlapping_kernel stores from several programs to one address']


def test_a_load_of_what_another_program_stores_is_found():
    assert _findings(lambda x, y: _carrying_kernel[(len(x),)](x, y, len(x)), whole=False) == [
        '_carrying_kernel loads what another program of the same launch stores']


def test_a_result_that_depends_on_the_order_of_programs_is_found():
    """Atomic additions are no race, but they round in the order of the programs."""
    def run(x, y):
        total = torch.zeros(1)
        _adding_kernel[(len(x),)](x, total, len(x), BLOCK=1)
        y.fill_(float(total))
    assert any(finding.startswith('results change with the order of programs') for finding in _findings(run, 99))


@pytest.mark.parametrize('wide', [False, True])
def test_a_stride_product_of_32_bits_is_found(wide):
    def run(x, y):
        _rows_kernel[(len(x),)](x, y, x.stride(0), WIDE=wide)
    call = Call(_doubled(run), lambda: [torch.randn(3, 1)], (0,), ())
    found = ' '.join(sanitize.check_large_strides(call, sparse_memory()).findings)
    assert ('int32 overflow detected for operation mul' in found) is not wide
    assert ('loads outside of a tensor of shape (3, 1)' in found) is not wide


def test_the_kernels_of_the_package_have_no_findings_and_all_are_launched(python):
    done = python('import sys; from lab import sanitize; sys.exit(sanitize.main(["--short"]))', TRITON_INTERPRET='1')
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r'\b_\w+_kernel', done.stdout)) == sanitize.kernel_names()
