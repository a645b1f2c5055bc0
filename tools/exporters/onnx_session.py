"""Run files of the formats ONNX and ORT on ONNX Runtime."""
import json
from pathlib import Path
from typing import Any, Callable, Dict, List

import onnxruntime
import torch
from torch import Tensor

from ..common.cli import UserError, shown

INPUT = 'image'                         # name of the input
METADATA = 'subquad'                    # key of the metadata in the file


def runner(path: Path, threads: int = 1) -> Callable[[Tensor], List[Tensor]]:
    """Return a function that runs a file.

    Args:
        path: File of the format ONNX or ORT.
        threads: Number of threads.

    Returns:
        A function from images (B, C, H, W), float32, to the outputs in the order of the file. Of a detector that
        selects its detections, these are the boxes and scores before.

    Raises:
        UserError: ONNX Runtime cannot read the file.
    """
    session = open_session(path, threads)
    names = [output.name for output in session.get_outputs()]
    names = [name for name in names if name.startswith('raw_')] or names

    def run(images: Tensor) -> List[Tensor]:
        return [torch.from_numpy(output) for output in session.run(names, {INPUT: images.numpy()})]

    return run


def metadata_of(path: Path) -> Dict[str, Any]:
    """Return the metadata of a file; see `file_metadata.describe`.

    Raises:
        UserError: ONNX Runtime cannot read the file, or it has no such metadata.
    """
    properties = open_session(path, optimize=False).get_modelmeta().custom_metadata_map
    if METADATA not in properties:
        raise UserError(f'{shown(path)} has no metadata of `subquad export`')
    return json.loads(properties[METADATA])


def open_session(path: Path, threads: int = 1, optimize: bool = True) -> onnxruntime.InferenceSession:
    """Open a file on the CPU.

    Args:
        path: File of the format ONNX or ORT.
        threads: Number of threads.
        optimize: Optimize the graph of an ONNX file, which takes longer.

    Raises:
        UserError: ONNX Runtime cannot read the file.
    """
    options = session_options(threads)
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
    except Exception as error:            # the classes of ONNX Runtime's errors have no common base
        reason = ' '.join(str(error).split())
        raise UserError(f'ONNX Runtime cannot read {shown(path)}: {shown(reason, 300)}') from error


def session_options(threads: int = 1) -> onnxruntime.SessionOptions:
    """Return options to run one operator at a time, on `threads` threads that sleep while they wait."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry('session.intra_op.allow_spinning', '0')
    options.log_severity_level = 3        # errors only
    return options
