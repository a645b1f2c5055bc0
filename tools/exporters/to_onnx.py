"""Export to ONNX, for ONNX Runtime on computers, on servers and in browsers."""
from pathlib import Path
from typing import Any, Callable, Dict, List

import onnx
from torch import Tensor

from .formats import Conversion, Options
from .onnx_graph import count_operators
from .onnx_model import onnx_model
from .onnx_session import metadata_of, runner
from .subject import Subject


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write an ONNX file with its weights inside.

    Args:
        subject: What to export.
        options: Precision, dynamic dimensions and calibration images.
        path: The file to write.

    Raises:
        UserError: The graph cannot be recorded or holds what other runtimes cannot run, or the file would be larger
            than 2 GB.
    """
    model = onnx_model(subject, options)
    onnx.save_model(model, str(path))
    return Conversion(operators=count_operators([node.op_type for node in model.graph.node]))


def load(path: Path, threads: int = 1) -> Callable[[Tensor], List[Tensor]]:
    """Return a function that runs the file.

    Args:
        path: File written by `convert`.
        threads: Number of threads.

    Returns:
        A function from images (B, C, H, W), float32, to the outputs in order of `subject.outputs`.

    Raises:
        UserError: ONNX Runtime cannot read the file.
    """
    return runner(path, threads)


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata of the file; see `file_metadata.describe`.

    Raises:
        UserError: ONNX Runtime cannot read the file, or it has no such metadata.
    """
    return metadata_of(path)
