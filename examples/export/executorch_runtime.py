"""Run a .pte file of `subquad export` on a picture with ExecuTorch.

    pip install executorch numpy pillow
    python examples/export/executorch_runtime.py MODEL.pte PICTURE [--out FILE.png]
"""
import json
from typing import List, Tuple

import numpy as np
import pictures
import torch
from executorch.runtime import Runtime


def load(path: str) -> Tuple[pictures.Metadata, pictures.Run]:
    """Return the file's metadata and a function that runs the model on an array (1, C, H, W)."""
    program = Runtime.get().load_program(path)
    if 'metadata' not in program.method_names:
        raise KeyError('metadata')
    metadata = json.loads(program.load_method('metadata').execute([])[0])
    forward = program.load_method('forward')

    def run(pixels: np.ndarray) -> List[np.ndarray]:
        return [output.numpy() for output in forward.execute([torch.from_numpy(pixels)])]
    return metadata, run


if __name__ == '__main__':
    pictures.main(load)
