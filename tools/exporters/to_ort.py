"""Export to the ORT format of ONNX Runtime Mobile, which its small builds for phones read."""
from pathlib import Path
from typing import Any, Callable, Dict, List

import onnxruntime
from torch import Tensor

from .formats import Conversion, Options
from .onnx_graph import count_operators
from .onnx_model import onnx_model
from .onnx_session import metadata_of, runner, session_options
from .subject import Subject


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write an ORT file, with the optimizations that every processor supports.

    A float16 file is optimized less: this computer's kernels for float32 would turn its weights to float32.

    Args:
        subject: What to export.
        options: Precision, dynamic dimensions and calibration images.
        path: The file to write.

    Raises:
        UserError: As for `to_onnx.convert`.
    """
    model = onnx_model(subject, options)
    settings, disabled = session_options(), ['NchwcTransformer']      # it writes a layout for this kind of processor
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    if options.precision == 'fp16':
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        disabled.append('ConstantFolding')
    settings.optimized_model_filepath = str(path)
    settings.add_session_config_entry('session.save_model_format', 'ORT')
    onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=['CPUExecutionProvider'],
                                 disabled_optimizers=disabled)
    return Conversion(operators=_operators(path))


def load(path: Path, threads: int = 1) -> Callable[[Tensor], List[Tensor]]:
    """Return a function that runs the file; see `to_onnx.load`."""
    return runner(path, threads)


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata of the file; see `to_onnx.read_metadata`."""
    return metadata_of(path)


def _operators(path: Path) -> Dict[str, int]:
    """Count the operators of an ORT file, which are those of the optimized graph."""
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs import InferenceSession
    graph = InferenceSession.InferenceSession.GetRootAsInferenceSession(path.read_bytes(), 0).Model().Graph()
    return count_operators([graph.Nodes(n).OpType().decode() for n in range(graph.NodesLength())])
