"""Run benchmark jobs, each in processes of its own."""
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

from ..common.cli import UserError
from ..common.output import print_table
from ..engine.records import append, environment
from .measure import OtherLoad
from .metrics import medians, prepare, table
from .presets import Preset

KILLED = 'the process was killed, perhaps for lack of memory'


def measure_here(job: Preset, threads: int, repeats: Optional[int]) -> Dict[str, Any]:
    """Measure a job in this process.

    Returns:
        The record with its metadata.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if job.device == 'cpu':                         # workers that compile would be taken for other programs
        os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '1')
    repeats, others = repeats or job.repeats, OtherLoad()
    measured = job.run(repeats)
    return {'preset': job.name, 'description': job.description, 'repeats': repeats, **measured,
            'other_cpus': others.cpus(), **environment(job.device)}


class ProcessFailed(Exception):
    """A process ended with an error that is not a UserError.

    Attributes:
        code: Exit code; negative for the signal that ended the process.
        messages: What the process wrote to stderr.
    """

    def __init__(self, code: int, messages: str):
        super().__init__(code, messages)
        self.code, self.messages = code, messages


def run_in_fresh_process(module: str, argv: List[str], threads: int) -> Dict[str, Any]:
    """Run a module of this package in a new process, and return the record that it prints as its last line.

    Args:
        module: The module, such as 'tools.benchmark'.
        argv: Its command line.
        threads: CPU threads.

    Raises:
        UserError: The process raised it.
        ProcessFailed: The process failed otherwise.
    """
    command = [sys.executable, '-m', f'subquad.{module}', *argv]
    # The process imports what this one imports, also from a checkout, and nothing else from the working directory.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    counts = dict.fromkeys(('OMP_NUM_THREADS', 'MKL_NUM_THREADS'), str(threads))
    done = subprocess.run(command, env={**os.environ, **counts, 'PYTHONPATH': path, 'PYTHONSAFEPATH': '1'},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        *messages, record = done.stdout.splitlines()
        print('\n'.join(messages), end='\n' if messages else '')
        return json.loads(record)
    last = (done.stderr.strip().splitlines() or [''])[-1]
    if done.returncode == 2 and last.startswith('error: '):                      # a UserError, after other messages
        raise UserError(last.removeprefix('error: '))
    raise ProcessFailed(done.returncode, done.stderr)


def measure_in_fresh_process(name: str, argv: List[str], threads: int) -> Dict[str, Any]:
    """Measure a job in a new process, whose allocator and peak memory no other job has touched.

    Args:
        name: The job among those of the command line.
        argv: The command line.
        threads: CPU threads.

    Raises:
        UserError: The process failed. Its messages are on stderr.
    """
    try:
        return run_in_fresh_process('tools.benchmark', [*argv, '--one', name], threads)
    except UserError as error:
        raise UserError(f'{name}: {error}') from error
    except ProcessFailed as error:
        sys.stderr.write(error.messages)
        why = KILLED if error.code < 0 else 'its message is above'
        raise UserError(f'{name} could not be measured ({why})') from error


def measure_all(jobs: Dict[str, Preset], argv: List[str], threads: int, processes: Optional[int], out: Optional[Path]
                ) -> None:
    """Measure jobs one after the other, save each record as soon as it is complete, and print a table.

    Args:
        jobs: The jobs by name.
        argv: The command line that describes them.
        threads: CPU threads.
        processes: Processes for each job (default: the preset's own number).
        out: Folder of the results files, or None to save nothing.

    Raises:
        UserError: The folder cannot be written, or a job failed; the other jobs are measured all the same.
    """
    paths = {job.device: prepare(out, job.device) for job in jobs.values()} if out else {}
    records, failures = [], []
    try:
        for name, job in jobs.items():
            print(f'measuring {name}: {job.description}', file=sys.stderr, flush=True)
            try:
                records.append(medians([measure_in_fresh_process(name, argv, threads)
                                        for _ in range(processes or job.processes)]))
            except UserError as error:
                failures.append(str(error))
                continue
            if out:
                append(paths[job.device], records[-1])
                if job.draw:
                    job.draw(records[-1], out / f'{name}.png')
                    print(f"drew {out / f'{name}.png'}")
    finally:                                        # also after an interruption
        if records:
            print_table(table(records))
    if paths and records:
        print(f"added {len(records)} line(s) to {', '.join(map(str, paths.values()))}")
    if failures:
        raise UserError('; '.join(failures))
