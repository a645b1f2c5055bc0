"""Evaluate a classifier's weights on the test data of a config."""
import tempfile
from typing import Dict

from ...common.cli import UserError


def evaluate(config, checkpoint: str, as_configured: bool = False, allow_nonfinite: bool = True) -> Dict[str, float]:
    """Metrics of a checkpoint on the config's test data, in percent. Options of the model are the checkpoint's.

    Args:
        config: mmengine Config. checkpoint: file.
        as_configured: refuse a checkpoint whose options are not the config's.
        allow_nonfinite: evaluate weights that hold NaN or infinities.

    Raises:
        UserError: the config, the data or the checkpoint do not fit.
    """
    from ....backbones.weights import WeightsError, load_weights, read_checkpoint, some
    from ..starting_weights import network_options
    from .runner import NOT_OF_THE_NETWORK, build_runner, network
    if not allow_nonfinite:
        _refuse_nonfinite(checkpoint)
    try:
        _, facts, _ = read_checkpoint(checkpoint)
    except WeightsError as error:
        raise UserError(str(error)) from error
    if facts:        # options that change no weight's shape would go unnoticed: take them from the file
        if facts.get('model') != config.model.name:
            raise UserError(f"{checkpoint} is of {facts.get('model')}, the config of {config.model.name} "
                            '(--model NAME)')
        given = {key: value for key, value in config.model.items() if key not in NOT_OF_THE_NETWORK}
        options = network_options(facts, checkpoint)
        other = [key for key in {**given, **options} if given.get(key) != options.get(key)]
        if as_configured and other:
            raise UserError(f'--record: {checkpoint} has {other[0]}={options.get(other[0])!r}, the config '
                            f'{given.get(other[0])!r}')
        config.model.update(options)
    with tempfile.TemporaryDirectory() as folder:       # mmengine insists on a folder for its log
        runner = build_runner(config, folder, training=False)
        classes = list(runner.test_dataloader.dataset.classes)
        if facts and facts.get('classes', classes) != classes:
            raise UserError(f"{checkpoint} knows the classes {some(facts['classes'])}, the data has {some(classes)}")
        try:
            load_weights(network(runner), checkpoint)
        except WeightsError as error:
            raise UserError(str(error)) from error
        metrics = runner.test()
        for handler in list(runner.logger.handlers):
            handler.close()
            runner.logger.removeHandler(handler)        # mmengine would go on writing to it
    return {name: float(value) for name, value in metrics.items()}


def _refuse_nonfinite(checkpoint: str) -> None:
    """Refuse weights that hold NaN or infinities: their metrics mean nothing.

    Raises:
        UserError: such a file, or one that cannot be read.
    """
    from ....backbones.weights import NonFiniteError, WeightsError, check_finite, read_checkpoint
    try:
        weights, _, _ = read_checkpoint(checkpoint)
        check_finite(weights, checkpoint)
    except NonFiniteError as error:
        raise UserError(f'{error}; --allow-nonfinite tests it anyway') from error
    except WeightsError as error:
        raise UserError(str(error)) from error
