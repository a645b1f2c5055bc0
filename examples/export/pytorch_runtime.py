"""Run a .pt2 file of `subquad export`, of the graph or of machine code, on a picture with PyTorch.

    pip install torch numpy pillow
    python examples/export/pytorch_runtime.py MODEL.pt2 PICTURE [--out FILE.png]
"""
import json
import zipfile
from typing import List, Tuple

import numpy as np
import pictures
import torch


def load(path: str) -> Tuple[pictures.Metadata, pictures.Run]:
    """Return the file's metadata and a function that runs the model on an array (1, C, H, W)."""
    with zipfile.ZipFile(path) as archive:
        folder = archive.namelist()[0].partition('/')[0]
        metadata = json.loads(archive.read(f'{folder}/extra/subquad.json'))
    compiled = metadata['format'] == 'aoti'
    model = torch._inductor.aoti_load_package(path) if compiled else torch.export.load(path).module()

    def run(pixels: np.ndarray) -> List[np.ndarray]:
        with torch.no_grad():
            return [output.numpy() for output in model(torch.from_numpy(pixels))]
    return metadata, run


if __name__ == '__main__':
    pictures.main(load)
