"""Run the files of `subquad export --format ncnn` on a picture with ncnn.

    pip install ncnn numpy pillow
    python examples/export/ncnn_runtime.py MODEL.ncnn.param PICTURE [--out FILE.png]

The weights, MODEL.ncnn.bin, and the metadata, MODEL.json, are beside the file.
"""
import json
from pathlib import Path
from typing import List, Tuple

import ncnn
import numpy as np
import pictures


def load(path: str) -> Tuple[pictures.Metadata, pictures.Run]:
    """Return the model's metadata and a function that runs it on an array (1, C, H, W)."""
    stem = Path(path.removesuffix('.param').removesuffix('.ncnn'))
    if not (side := stem.with_name(f'{stem.name}.json')).is_file():
        raise KeyError(side.name)
    metadata = json.loads(side.read_text(encoding='utf-8'))
    net = ncnn.Net()
    net.opt.num_threads = 1
    for name, value in metadata['runtime']['options'].items():         # ncnn computes with 16 bits where it can
        setattr(net.opt, name, value)
    if net.load_param(path) or net.load_model(path.removesuffix('param') + 'bin'):
        raise ValueError('ncnn cannot read the .param or the .bin file')

    def run(pixels: np.ndarray) -> List[np.ndarray]:
        with net.create_extractor() as extractor:
            extractor.input(metadata['input']['name'], ncnn.Mat(pixels[0]).clone())
            outputs = [extractor.extract(output['name']) for output in metadata['outputs']]
        if any(code for code, _ in outputs):
            raise RuntimeError('ncnn has no memory or cannot run the model')
        return [np.array(output).reshape(item['shape']) for (_, output), item in zip(outputs, metadata['outputs'])]
    return metadata, run


if __name__ == '__main__':
    pictures.main(load)
