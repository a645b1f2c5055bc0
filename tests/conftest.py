import functools
import json
import os
import random
import signal
import subprocess
import sys

import fork_server as fork_server_script
import numpy as np
import pytest
import torch

# Where there is no GPU the Triton kernels run in Triton's interpreter, which must be asked for before its import.
if not torch.cuda.is_available() and 'triton' not in sys.modules:
    os.environ.setdefault('TRITON_INTERPRET', '1')

import subquad  # noqa: F401  (before timm: it works around a mismatched torchvision)

pytest.register_assert_rewrite('golden_networks')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Long tests are slow, too. Leave out the tests that need a network, unless -m names them."""
    for item in items:
        if item.get_closest_marker('long'):
            item.add_marker('slow')
    if 'network' not in config.option.markexpr:
        needy = [item for item in items if item.get_closest_marker('network')]
        config.hook.pytest_deselected(items=needy)
        items[:] = [item for item in items if item not in needy]


@pytest.fixture(autouse=True)
def seeded():
    """No test's numbers depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope='session')
def metafiles_read_once():
    """MMEngine reads MMDetection's hundred metafiles for each base of each config."""
    import mmengine.config.utils
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmengine.config.utils, 'load', functools.lru_cache(None)(mmengine.config.utils.load))
        yield


@pytest.fixture
def sigint():
    """SIGINT interrupts: the background job of a shell, in which tests may run, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _environment(more):
    """This process's environment, in which another one finds what this one finds."""
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(entry or os.getcwd() for entry in sys.path), **more}


@pytest.fixture(scope='session')
def fork_server():
    """A process that has imported PyTorch, which takes seconds, and runs scripts in copies of itself."""
    command = [sys.executable, '-W', 'ignore', fork_server_script.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=_environment({})) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def python(request):
    """Runs a script in a process of its own, which finds what this one finds: python(script, VARIABLE=value).

    It begins with PyTorch imported, unless it is to be `fresh`: for memory, and for threads by OMP_NUM_THREADS.
    """
    def run(script, fresh=False, **environment):
        command = [sys.executable, '-W', 'ignore', '-c', script]
        if fresh:
            return subprocess.run(command, env=_environment(environment), capture_output=True, text=True)
        server = request.getfixturevalue('fork_server')
        server.stdin.write(json.dumps(dict(script=script, environment=_environment(environment))) + '\n')
        server.stdin.flush()
        return subprocess.CompletedProcess(command, *json.loads(server.stdout.readline()))
    return run
