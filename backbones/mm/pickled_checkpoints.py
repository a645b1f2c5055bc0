"""Let MMEngine read pickles without running code, and published files that hold only weights.

MMEngine's loader reads a file again without any check if the safe way fails. The loader of this module never does. It
also returns the entries that MMEngine's tools need and that published files lack: EMAHook reads `state_dict`, and
MMSegmentation's `init_model` reads `meta`. It replaces MMEngine's loader of local files when this package is imported.
"""
from pathlib import Path
from typing import Any, Dict

from mmengine.runner import CheckpointLoader
from torch import Tensor

from ..weights import WeightsError, shorten_path, unwrap
from ..weights.pickles import read_pickle


@CheckpointLoader.register_scheme(prefixes='', force=True)
def load_from_local(filename: str, map_location: Any = None) -> Dict[str, Any]:
    """Read a local file of `torch.save` for mmengine.

    Args:
        filename: the path of a Runner's checkpoint, or of a published file with or without a wrapper such as `model`.
        map_location: not used; the tensors are on the CPU, from where MMEngine and torch copy them to the model.

    Returns:
        The checkpoint, with the entries `state_dict` and `meta`.

    Raises:
        WeightsError: the file does not exist, is damaged, contains code, or holds no weights.
    """
    path = Path(filename).expanduser()
    if not path.is_file():
        raise WeightsError(f'no weight file at {shorten_path(path)}')
    checkpoint = read_pickle(path)
    if not isinstance(checkpoint, dict):
        raise WeightsError(f'{shorten_path(path)} holds no weights')
    if isinstance(checkpoint.get('state_dict'), dict):
        return {'meta': {}, **checkpoint}
    weights, _ = unwrap(checkpoint)
    weights = {key: value for key, value in weights.items() if isinstance(value, Tensor)}
    if not weights:
        raise WeightsError(f'{shorten_path(path)} holds no weights')
    return dict(state_dict=weights, meta=checkpoint.get('meta', {}))
