"""Kernels of a model are compiled before its first call."""
import pytest

pytest.importorskip('triton')


def test_processes_share_the_kernels(python):
    """The first of many processes compiles one kernel, and the last one none, because there are not so many."""
    done = python('''
from lab.compile_time import Job, compile_share
for part in (0, 999):
    print(compile_share(Job('test_mobilevitv2', 64, 'cuda:90', part, 1000)))
''', TRITON_INTERPRET='0')
    assert done.returncode == 0, done.stderr
    first, last = map(eval, done.stdout.splitlines())
    (name, seconds), = first
    assert name.endswith('_kernel') and seconds > 0 and last == []


def test_an_unknown_model_is_one_error():
    from lab import compile_time
    from subquad.tools.common.cli import UserError
    with pytest.raises(UserError, match='test_ppme'):
        compile_time.main(['test_ppme'])
