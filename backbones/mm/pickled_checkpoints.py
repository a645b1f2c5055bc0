"""Let MMEngine read pickles without running code, and published files that hold only weights.

MMEngine's loader reads a file again without any check if the safe way fails. The loader of this module never does. It
also returns the entries that MMEngine's tools need and that published files lack: EMAHook reads `state_dict`, and
MMSegmentation's `init_model` reads `meta`. It replaces MMEngine's loader of local files when this package is imported.
"""
from pathlib import Path
from typing import Any, Dict

from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader

from ..weights import WeightsError, shorten_path
from ..weights.files import find_weights, remove_compile_prefix
from ..weights.pickles import read_pickle
from ..weights.registry import SCHEME, WEIGHTS


@CheckpointLoader.register_scheme(prefixes='', force=True)
def load_from_local(filename: str, map_location: Any = None) -> Dict[str, Any]:
    """Read a local file of `torch.save` for MMEngine.

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
        hint = f'; for published weights, write {SCHEME}{filename}' if filename in WEIGHTS else ''
        raise WeightsError(f'no weight file at {shorten_path(path)}{hint}')
    checkpoint = read_pickle(path)
    if not isinstance(checkpoint, dict):
        raise WeightsError(f'{shorten_path(path)} holds no weights')
    if isinstance(checkpoint.get('state_dict'), dict):
        compiled = {key: remove_compile_prefix(checkpoint[key]) for key in ('state_dict', 'ema_state_dict')
                    if isinstance(checkpoint.get(key), dict)}
        return {'meta': {}, **checkpoint, **compiled}
    content = find_weights(checkpoint, path, preferred='raw')
    if content.choice:
        print_log(f'{filename}: {content.choice}', logger='current')
    return dict(state_dict=content.weights, meta=content.runner_meta)
