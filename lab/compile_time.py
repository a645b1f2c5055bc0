"""Compile the Triton kernels of bfloat16 models before their first call, and say how long that takes.

`python -m lab.compile_time ppma_tiny` compiles what a training step and a prepared forward pass launch, in parallel
processes and without a GPU. A program on a GPU of the target finds the kernels in Triton's cache (~/.triton/cache, or
TRITON_CACHE_DIR), if it has the same version of Triton. With --cold, the cache is an empty one that is removed.
"""
import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Dict, List, NamedTuple, Optional, Tuple
from unittest import mock

import torch

from subquad import prepare
from subquad.backbones import prepare as forms
from subquad.backbones import prepare_gpu
from subquad.tools.common.cli import UserError
from subquad.tools.engine import zoo

from . import aot


class Job(NamedTuple):
    """The share of the kernels of a model that a process compiles: every `parts`-th one, from number `part` on."""
    model: str
    size: int
    target: str
    part: int = 0
    parts: int = 1


def launch(name: str, size: int) -> None:
    """Run a training step and a prepared forward pass on meta tensors, inside of `aot.compiling_for`."""
    model = zoo.create(name, device='meta', **zoo.size_options(name, (size, size))).bfloat16()
    images = torch.empty(8, 3, size, size, device='meta', dtype=torch.bfloat16)
    model.train()(images).sum().backward()
    with torch.no_grad(), mock.patch.object(forms, 'is_on_gpu', lambda layer: True), mock.patch.object(
            prepare_gpu, 'is_on_gpu', lambda layer: True):
        prepare(model.eval())(images)


def compile_share(job: Job) -> List[Tuple[str, float]]:
    """Return the name of each kernel of a job and the seconds that its compilation took."""
    import triton
    seen: Dict[str, None] = {}
    found: List[Tuple[str, float]] = []

    def skips(*, key, repr, **others) -> bool:
        variant = f'{repr} {key}'
        known = variant in seen
        seen[variant] = None
        return known or (len(seen) - 1) % job.parts != job.part

    def listen(*, metadata, times, **others) -> None:
        found.append((metadata['name'], times.total / 1e6))

    with aot.compiling_for(job.target), mock.patch.object(triton.knobs.runtime, 'jit_cache_hook', skips), \
            mock.patch.object(triton.knobs.compilation, 'listener', listen):
        launch(job.model, job.size)
    return found


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser('python -m lab.compile_time', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='+', metavar='MODEL')
    parser.add_argument('--target', default='cuda:90', help='such as cuda:80 or hip:gfx942 (default: %(default)s)')
    parser.add_argument('--size', type=int, default=224, help='side of the images (default: %(default)s)')
    parser.add_argument('--processes', type=int, default=len(os.sched_getaffinity(0)), metavar='N',
                        help='(default: the number of CPUs, %(default)s)')
    parser.add_argument('--cold', action='store_true', help='compile into an empty cache, which is removed')
    args = parser.parse_args(argv)
    if args.processes < 1:
        raise UserError(f'--processes must be at least 1, got {args.processes}')
    for name in args.models:
        zoo.create(name, device='meta')                     # an unknown name is one error, before anything starts
    with tempfile.TemporaryDirectory() as folder:
        if args.cold:
            os.environ['TRITON_CACHE_DIR'] = folder         # the processes inherit it
        with ProcessPoolExecutor(args.processes, get_context('spawn')) as pool:
            for name in args.models:
                start = time.monotonic()
                jobs = [Job(name, args.size, args.target, part, args.processes) for part in range(args.processes)]
                found = [kernel for share in pool.map(compile_share, jobs) for kernel in share]
                slowest, seconds = max(found, key=lambda kernel: kernel[1], default=('none', 0.))
                total, wall = sum(seconds for _, seconds in found), time.monotonic() - start
                print(f'{name}: {len(found)} kernels for {args.target}, {total:.0f} s of compilation in {wall:.0f} s; '
                      f'the slowest is {slowest}, {seconds:.1f} s', flush=True)


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
