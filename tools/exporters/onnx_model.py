"""The ONNX model of a subject, which the formats ONNX and ORT share."""
import contextlib
import logging
import warnings
from typing import AbstractSet, Iterator

import onnx
import torch
from onnx import ModelProto

from ..common.cli import UserError, quiet
from .file_metadata import dumps
from .formats import Options
from .graph import export_program
from .onnx_graph import OPSET, check_graph, merge_reshapes, name_dimensions, refuse_other_sizes, strip, translations
from .onnx_precision import halve, quantize
from .onnx_session import INPUT, METADATA
from .postprocessing import append_nms
from .subject import Subject

_LARGEST_FILE = 2 ** 31 - 2 ** 20       # a protocol buffer holds less than 2 GiB


def onnx_model(subject: Subject, options: Options) -> ModelProto:
    """Return a subject as a checked ONNX model with its metadata and all weights inside.

    Args:
        subject: What to export.
        options: Precision, dynamic dimensions and calibration images.

    Raises:
        UserError: The graph cannot be recorded or holds what other runtimes cannot run, or the model is larger than
            2 GB.
    """
    model = record(subject, options.dynamic)
    with silent():
        if options.precision == 'fp16':
            model = halve(model)
        elif options.precision == 'int8':
            model = quantize(model, [{INPUT: image.numpy()} for image in options.calibration])
    settings = subject.metadata.get('postprocessing') or {}
    if settings.get('type') == 'nms' and settings['in_graph']:
        model = append_nms(model, settings)
    check_graph(model)
    onnx.checker.check_model(model, full_check=True)
    model.producer_name, model.producer_version = METADATA, subject.metadata.get(METADATA, '')
    onnx.helper.set_model_props(model, {METADATA: dumps(subject.metadata)})
    return model


def record(subject: Subject, dynamic: AbstractSet[str] = frozenset()) -> ModelProto:
    """Return a subject as an ONNX model in float32.

    Raises:
        UserError: The graph cannot be recorded, or the model is larger than 2 GB.
    """
    with silent():
        exported = torch.onnx.export(
            export_program(subject, dynamic),
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=list(subject.outputs),
            custom_translation_table=translations(),
            external_data=False,
            verbose=False,
        )
    model = exported.model_proto
    if model.ByteSize() > _LARGEST_FILE:
        raise UserError(f'{subject.name} is larger than 2 GB, which an ONNX file without further files cannot hold')
    strip(model)
    merge_reshapes(model)
    name_dimensions(model, {0: 'batch', 2: 'height', 3: 'width'})
    if 'hw' in dynamic and subject.sizes.multiple_of > 1:
        refuse_other_sizes(model, subject.sizes.multiple_of)
    return model


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep the converters' progress, warnings and log messages from the standard streams."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(before)
