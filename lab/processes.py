"""Run a module in a new process with its own count of threads, and read the record that it prints."""
import json
import os
import subprocess
import sys
from typing import Any, Dict, List

from subquad.tools.common.cli import UserError

KILLED = 'the process was killed, perhaps for lack of memory'


class ProcessFailed(Exception):
    """A process ended with an error that is not a UserError.

    Attributes:
        code: Exit code; negative for the signal that ended the process.
        messages: What the process wrote to stderr.
    """

    def __init__(self, code: int, messages: str):
        super().__init__(code, messages)
        self.code, self.messages = code, messages


def search_path() -> str:
    """PYTHONPATH for a process that imports what this one imports."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def run_in_fresh_process(module: str, argv: List[str], threads: int) -> Dict[str, Any]:
    """Run `python -m MODULE ARGV` with a number of threads, and return the record of its last line.

    Raises:
        UserError: The process raised it.
        ProcessFailed: The process failed otherwise.
    """
    counts = dict.fromkeys(('OMP_NUM_THREADS', 'MKL_NUM_THREADS'), str(threads))
    done = subprocess.run([sys.executable, '-m', module, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={**os.environ, **counts, 'PYTHONPATH': search_path(), 'PYTHONSAFEPATH': '1'}, text=True)
    if done.returncode == 0:
        *messages, record = done.stdout.splitlines()
        print('\n'.join(messages), end='\n' if messages else '')
        return json.loads(record)
    last = (done.stderr.strip().splitlines() or [''])[-1]
    if done.returncode == 2 and last.startswith('error: '):              # a UserError, after other messages
        raise UserError(last.removeprefix('error: '))
    raise ProcessFailed(done.returncode, done.stderr)
