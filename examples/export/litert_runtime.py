"""Run a .tflite file of `subquad export` on a picture with LiteRT.

    pip install ai-edge-litert numpy pillow
    python examples/export/litert_runtime.py MODEL.tflite PICTURE [--out FILE.png]
"""
import json
import zipfile
from typing import List, Tuple

import numpy as np
import pictures
from ai_edge_litert.interpreter import Interpreter


def load(path: str) -> Tuple[pictures.Metadata, pictures.Run]:
    """Return the file's metadata and a function that runs the model on an array (1, H, W, C)."""
    if not zipfile.is_zipfile(path):                    # the metadata are a zip archive behind the model
        raise KeyError('subquad.json')
    with zipfile.ZipFile(path) as archive:
        metadata = json.loads(archive.read('subquad.json'))
    runner = Interpreter(path, num_threads=1).get_signature_runner()

    def run(pixels: np.ndarray) -> List[np.ndarray]:
        outputs = runner(**{metadata['input']['name']: pixels})
        return [outputs[output['name']] for output in metadata['outputs']]
    return metadata, run


if __name__ == '__main__':
    pictures.main(load)
