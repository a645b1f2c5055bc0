"""Records of measurements and evaluations: one line of JSON each, with the machine, the versions and the commit."""
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict

import timm
import torch

from ... import __version__
from ..common.cli import UserError
from ..common.output import dumps


def append(path: Path, record: Dict[str, Any]) -> None:
    """Append a record to a file as one line of JSON.

    The line is written at once, so that another process that appends or reads sees whole lines only.
    """
    line = dumps(record).encode() + b'\n'
    try:
        with open(path, 'a+b', buffering=0) as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b'\n':
                line = b'\n' + line                          # after a line that was cut short
            if file.write(line) != len(line):
                raise UserError(f'{path}: the disk is full; the last line is incomplete')
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}') from error


def _cpu_model() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    return (names or [platform.processor()])[0] or platform.machine()


def _run(*command: str) -> subprocess.CompletedProcess:
    """Run a program with its output as text; one that does not run returns 128 and nothing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return subprocess.CompletedProcess(command, 128, '', '')


def commit() -> Dict[str, Any]:
    """Commit of the checkout, and whether its Python files differ from it.

    Returns:
        {'commit', 'modified'}; both are None outside of a checkout.
    """
    root = Path(__file__).resolve().parents[2]
    # Without optional locks git never writes to the index, so it does not disturb another git that runs.
    git = ('git', '--no-optional-locks', '-C', str(root))
    answer = _run(*git, 'rev-parse', '--show-toplevel', 'HEAD')
    lines = answer.stdout.split('\n')
    # An installed package may lie inside another repository, whose commit says nothing about this package.
    if answer.returncode or Path(lines[0]).resolve() != root:
        return {'commit': None, 'modified': None}
    changes = _run(*git, 'diff', '--quiet', 'HEAD', '--', '*.py')
    return {'commit': lines[1], 'modified': {0: False, 1: True}.get(changes.returncode)}


def _gpu(device: str) -> Dict[str, Any]:
    """Name of the GPU, its current clocks and the versions of its software; nothing for a CPU."""
    if device != 'cuda':
        return {}
    import triton
    clocks = _run('nvidia-smi', '--query-gpu=clocks.sm,clocks.mem,driver_version', '--format=csv,noheader', '-i', '0')
    return {'gpu': torch.cuda.get_device_name(), 'clocks': clocks.stdout.strip() or None,
            'cuda': torch.version.cuda or torch.version.hip, 'triton': triton.__version__}


def environment(device: str = 'cpu') -> Dict[str, Any]:
    """Metadata of a measurement: device, threads, versions, commit and date (UTC, ISO 8601)."""
    return {'device': device, **_gpu(device), 'cpu': _cpu_model(), 'cpus': os.cpu_count(),
            'threads': torch.get_num_threads(), 'torch': torch.__version__, 'timm': timm.__version__,
            'subquad': __version__, 'python': platform.python_version(), **commit(),
            'date': datetime.now(timezone.utc).isoformat(timespec='seconds')}
