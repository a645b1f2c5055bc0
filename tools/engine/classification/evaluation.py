"""Evaluate a classifier's weights on the test data of a config."""
import tempfile
from typing import Any, Dict

from ....backbones.weights import (
    NonFiniteError,
    WeightsError,
    check_finite,
    load_state_dict,
    read_file,
    some,
)
from ....backbones.weights.resolve import resolve
from ...common.cli import UserError
from ..building import close_log
from ..starting_weights import network_options, say
from .runner import build_runner, network
from .weight_files import NOT_OF_THE_NETWORK


def evaluate(config, checkpoint: str, as_configured: bool = False, allow_nonfinite: bool = True) -> Dict[str, float]:
    """Compute the metrics of a checkpoint on the config's test data, in percent.

    The model is built with the options that the checkpoint holds.

    Args:
        config: mmengine Config; the checkpoint's options are written into it.
        checkpoint: File of weights, or the name of published ones.
        as_configured: Refuse a checkpoint whose options differ from the config's.
        allow_nonfinite: Evaluate weights that hold NaN or infinities.

    Raises:
        UserError: The config, the data or the checkpoint do not match.
    """
    try:
        content = read_file(resolve(checkpoint))
        if not allow_nonfinite:
            check_finite(content.weights, checkpoint)
    except NonFiniteError as error:
        raise UserError(f'{error}; --allow-nonfinite tests it anyway') from error
    except WeightsError as error:
        raise UserError(str(error)) from error
    metadata = content.metadata
    if metadata:
        _take_options(config, checkpoint, metadata, as_configured)
    if content.choice:
        say(f'{checkpoint}: {content.choice}')
    with tempfile.TemporaryDirectory() as folder:       # mmengine requires a folder for its log
        runner = build_runner(config, folder, training=False)
        classes = list(runner.test_dataloader.dataset.classes)
        if metadata and metadata.get('classes', classes) != classes:
            raise UserError(f"{checkpoint} knows the classes {some(metadata['classes'])}, the data has {some(classes)}")
        try:
            load_state_dict(network(runner), content.weights, checkpoint)
        except WeightsError as error:
            raise UserError(str(error)) from error
        metrics = runner.test()
        close_log(runner)
    return {name: float(value) for name, value in metrics.items()}


def _take_options(config, checkpoint: str, metadata: Dict[str, Any], as_configured: bool) -> None:
    """Write the checkpoint's options into the config: a wrong option can leave every shape of a weight the same."""
    if metadata.get('model') != config.model.name:
        raise UserError(f"{checkpoint} was trained as {metadata.get('model')}, but the config builds "
                        f'{config.model.name} (--model NAME changes it)')
    given = {key: value for key, value in config.model.items() if key not in NOT_OF_THE_NETWORK}
    options = network_options(metadata, checkpoint)
    other = [key for key in {**given, **options} if given.get(key) != options.get(key)]
    if as_configured and other:
        raise UserError(f'--record: {checkpoint} has {other[0]}={options.get(other[0])!r}, the config has '
                        f'{given.get(other[0])!r}')
    config.model.update(options)
