"""Run an .xml file of `subquad export` on a picture with OpenVINO.

    pip install openvino numpy pillow
    python examples/export/openvino_runtime.py MODEL.xml PICTURE [--out FILE.png]
"""
import json
from typing import List, Tuple

import numpy as np
import openvino
import pictures


def load(path: str) -> Tuple[pictures.Metadata, pictures.Run]:
    """Return the file's metadata and a function that runs the model on an array (1, C, H, W)."""
    graph = openvino.Core().read_model(path)
    if not graph.has_rt_info('subquad'):
        raise KeyError('subquad')
    metadata = json.loads(graph.get_rt_info('subquad').value)
    model = openvino.compile_model(graph, 'CPU', metadata['runtime']['options'])

    def run(pixels: np.ndarray) -> List[np.ndarray]:
        results = model(pixels)
        return [results[output['name']] for output in metadata['outputs']]
    return metadata, run


if __name__ == '__main__':
    pictures.main(load)
