"""Send the curves of a training run to TensorBoard, Weights & Biases or MLflow."""
from importlib.util import find_spec
from typing import Any, Sequence

from ...common.cli import UserError

# Name of `--log-to` -> MMEngine's backend and the package that it needs.
LOGGERS = {'tensorboard': ('TensorboardVisBackend', 'tensorboard'), 'wandb': ('WandbVisBackend', 'wandb'),
           'mlflow': ('MLflowVisBackend', 'mlflow')}


def use_loggers(config: Any, names: Sequence[str]) -> None:
    """Add loggers to a config, beside those that it has and the file of scalars that MMEngine writes anyway.

    Args:
        config: MMEngine Config.
        names: Keys of LOGGERS.
    """
    visualizer = dict(config.get('visualizer') or dict(type='Visualizer'))
    backends = list(visualizer.get('vis_backends') or [dict(type='LocalVisBackend')])
    known = {backend.get('type') for backend in backends}
    visualizer['vis_backends'] = [*backends, *(dict(type=kind) for kind in dict.fromkeys(
        LOGGERS[name][0] for name in names) if kind not in known)]
    config.visualizer = visualizer


def check_loggers(config: Any) -> None:
    """Refuse a config whose loggers need a package that is not installed; MMEngine imports it only in training.

    Raises:
        UserError: A package is missing; the message says how to install it.
    """
    for backend in (config.get('visualizer') or {}).get('vis_backends') or ():
        for kind, package in LOGGERS.values():
            if backend.get('type') == kind and find_spec(package) is None:
                raise UserError(f'{kind} needs {package}, which is not installed: pip install {package}')
