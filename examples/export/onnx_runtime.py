"""Run an .onnx or .ort file of `subquad export` on a picture with ONNX Runtime.

    pip install onnxruntime numpy pillow
    python examples/export/onnx_runtime.py MODEL.onnx PICTURE [--out FILE.png]
"""
import json
from typing import Tuple

import onnxruntime
import pictures


def load(path: str) -> Tuple[pictures.Metadata, pictures.Run]:
    """Return the file's metadata and a function that runs the model on an array (1, C, H, W)."""
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    metadata = json.loads(session.get_modelmeta().custom_metadata_map['subquad'])
    image = session.get_inputs()[0].name
    # A detector with non-maximum suppression also has the boxes and scores before it.
    names = [output.name for output in session.get_outputs() if not output.name.startswith('raw_')]
    return metadata, lambda pixels: session.run(names, {image: pixels})


if __name__ == '__main__':
    pictures.main(load)
