"""Export to ONNX, for ONNX Runtime on computers, on servers and in browsers, and to its format ORT for phones."""
import json
from pathlib import Path
from typing import AbstractSet, Any, Callable, Dict, List
from unittest import mock

import onnx
import onnxruntime
import torch
from onnx import ModelProto
from onnxscript import rewriter
from torch import Tensor

from ..common.cli import UserError, one_line, shown
from . import onnx_graph
from .formats import Conversion, Options
from .graph import export_program, silence
from .onnx_precision import halve, quantize
from .subject import Subject

INPUT = 'image'                         # name of the input
METADATA = 'subquad'                    # key of the metadata in the file
_LARGEST_FILE = 2 ** 31 - 2 ** 20       # a protocol buffer holds less than 2 GiB


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write an ONNX file with its weights inside, or an ORT file if the name ends in `.ort`."""
    model = build(subject, options)
    model.producer_name, model.producer_version = METADATA, subject.metadata.get(METADATA, '')
    onnx.helper.set_model_props(model, {METADATA: json.dumps(subject.metadata, ensure_ascii=False)})
    if path.suffix == '.ort':
        return _save_ort(model, options.precision, path)
    onnx.save_model(model, str(path))
    return Conversion(onnx_graph.count_operators([node.op_type for node in model.graph.node]))


def build(subject: Subject, options: Options) -> ModelProto:
    """Return a subject as a checked ONNX model without metadata; a detector's selects the detections if those say so.
    """
    model = record(subject, options.dynamic)
    with silence():
        if options.precision == 'fp16':
            model = halve(model)
        elif options.precision == 'int8':
            model = quantize(model, [{INPUT: image.numpy()} for image in options.calibration])
    if subject.selection:
        model = onnx_graph.append_nms(model, subject.selection)
    onnx_graph.check_graph(model)
    onnx.checker.check_model(model, full_check=True)
    return model


def record(subject: Subject, dynamic: AbstractSet[str] = frozenset()) -> ModelProto:
    """Return a subject as an ONNX model in float32."""
    # A rule with several outputs compares each node with all others, and would take minutes for unrolled scans.
    rules = tuple(rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule._target_pattern.has_single_output_node)
    with silence(), mock.patch.object(rewriter, '_DEFAULT_REWRITE_RULES', rules):
        exported = torch.onnx.export(
            export_program(subject, dynamic),
            dynamo=True,
            opset_version=onnx_graph.OPSET,
            input_names=[INPUT],
            output_names=list(subject.outputs),
            custom_translation_table=onnx_graph.translations(),
            external_data=False,
            verbose=False,
        )
    model = exported.model_proto
    if model.ByteSize() > _LARGEST_FILE:
        raise UserError(f'{subject.name} is larger than 2 GB, which an ONNX file without further files cannot hold')
    onnx_graph.strip(model)
    onnx_graph.merge_reshapes(model)
    onnx_graph.name_dimensions(model, {0: 'batch', 2: 'height', 3: 'width'})
    if 'hw' in dynamic and subject.sizes.multiple_of > 1:
        onnx_graph.refuse_other_sizes(model, subject.sizes.multiple_of)
    return model


def _save_ort(model: ModelProto, precision: str, path: Path) -> Conversion:
    """Write a model in the format ORT, with the optimizations that every processor supports.

    A float16 file is optimized less: this computer's kernels for float32 would turn its weights to float32.
    """
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs import InferenceSession
    settings, disabled = _session_options(), ['NchwcTransformer']     # it writes a layout for this kind of processor
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    if precision == 'fp16':
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        disabled.append('ConstantFolding')
    settings.optimized_model_filepath = str(path)
    settings.add_session_config_entry('session.save_model_format', 'ORT')
    onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=['CPUExecutionProvider'],
                                 disabled_optimizers=disabled)
    graph = InferenceSession.InferenceSession.GetRootAsInferenceSession(path.read_bytes(), 0).Model().Graph()
    return Conversion(onnx_graph.count_operators(
        graph.Nodes(n).OpType().decode() for n in range(graph.NodesLength())))


def load(path: Path, threads: int = 1) -> Callable[[Tensor], List[Tensor]]:
    """Return a function that runs a file of the format ONNX or ORT, with the outputs in the order of the file."""
    session = open_session(path, threads)

    def run(images: Tensor) -> List[Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, {INPUT: images.numpy()})]

    return run


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata of a file; see `subject.describe`."""
    properties = open_session(path, optimize=False).get_modelmeta().custom_metadata_map
    if METADATA not in properties:
        raise UserError(f'{shown(path)} has no metadata of `subquad export`')
    return json.loads(properties[METADATA])


def open_session(path: Path, threads: int = 1, optimize: bool = True) -> onnxruntime.InferenceSession:
    """Open a file of the format ONNX or ORT on the CPU; to optimize an ONNX file takes longer."""
    options = _session_options(threads)
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
    except Exception as error:            # the classes of ONNX Runtime's errors have no common base
        reason = shown(one_line(error), 300)
        raise UserError(f'ONNX Runtime cannot read {shown(path)}: {reason}') from error


def _session_options(threads: int = 1) -> onnxruntime.SessionOptions:
    """Return options to run one operator at a time, on `threads` threads that sleep while they wait."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry('session.intra_op.allow_spinning', '0')
    options.log_severity_level = 3        # errors only
    return options
