"""Write OpenVINO's representation, made from the ONNX model: `.xml` holds graph and metadata, `.bin` the weights."""
import json
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List

import openvino
import torch
from openvino.passes import ConstantFolding, Manager
from torch import Tensor

from ..common.cli import UserError, one_line, shown
from . import to_onnx
from .formats import FORMATS, Conversion, Options
from .graph import silence
from .subject import Subject


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write `path`, which ends with `.xml`, and the weights beside it.

    With fp16 the weights are stored in half precision, and the runtime chooses that of the arithmetic.
    """
    half = options.precision == 'fp16'
    model = to_onnx.build(subject, options._replace(precision='fp32') if half else options)
    with silence():
        # openvino.convert_model would also report the conversion over the network.
        model = openvino.Core().read_model(model.SerializeToString())
        if options.precision != 'int8':            # folding would turn weights in int8 into float32
            passes = Manager()
            passes.register_pass(ConstantFolding())
            passes.run_passes(model)
        model.set_rt_info(json.dumps(subject.metadata, ensure_ascii=False), to_onnx.METADATA)
        openvino.save_model(model, str(path), compress_to_fp16=half)
    kinds = Counter(node.get_type_name() for node in model.get_ordered_ops())
    return Conversion({kind: count for kind, count in kinds.most_common()
                       if kind not in ('Parameter', 'Constant', 'Result')})


def load(path: Path, threads: int = 1) -> Callable[[Tensor], List[Tensor]]:
    """Return a function that runs the file on the CPU in float32, with the outputs in the order of the file."""
    # By default, processors that have bfloat16 or float16 compute in it.
    options = dict(FORMATS['openvino'].exact, INFERENCE_NUM_THREADS=threads, NUM_STREAMS=1)
    model = openvino.compile_model(_read(path), 'CPU', options)

    def run(images: Tensor) -> List[Tensor]:
        results = model(images.numpy())
        return [torch.from_numpy(results[output]) for output in model.outputs]

    return run


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata of a file; see `subject.describe`."""
    model = _read(path)
    if not model.has_rt_info(to_onnx.METADATA):
        raise UserError(f'{shown(path)} has no metadata of `subquad export`')
    return json.loads(model.get_rt_info(to_onnx.METADATA).value)


def _read(path: Path) -> openvino.Model:
    try:
        return openvino.Core().read_model(str(path))
    except RuntimeError as error:
        raise UserError(f'OpenVINO cannot read {shown(path)}: {shown(one_line(error), 300)}') from error
