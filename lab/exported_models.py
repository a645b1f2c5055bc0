"""Latency of exported models against timm's implementation with the same weights, in the same runtime."""
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import timm
import torch
from timm.layers import set_exportable
from torch import Tensor, nn

from subquad.tools.bench.measure import time_interleaved
from subquad.tools.bench.metrics import metric, speedup
from subquad.tools.common.cli import UserError
from subquad.tools.exporters import formats
from subquad.tools.exporters.formats import FORMATS, Options
from subquad.tools.exporters.graph import silence
from subquad.tools.exporters.pipeline import difference, with_file_metadata
from subquad.tools.exporters.subject import classifier_subject, fuse_norms, random_classifier

from .export_matrix import randomize_norms

Run = Callable[[Tensor], Any]


def exported_models(repeats: int, *, name: str, baseline: str, runtime: str, max_ratio: float, aim: float,
                    tolerance: float = 1e-4) -> Dict[str, Any]:
    """Export a model with `subquad export`'s functions and timm's model as timm's users do, and time both files.

    BatchNorm is fused in both. timm's model is converted as the runtime's documentation says, without further
    rewriting; for LiteRT, whose converter refuses it, by onnx2tf, which must be on the path and needs TensorFlow. Both
    files run with the same options.

    Args:
        repeats: Rounds of timing, with one thread and one image.
        name: The model.
        baseline: timm's model, which takes the weights of the model.
        runtime: 'onnx', 'openvino', 'executorch', 'litert' or 'ncnn'.
        max_ratio: Target: median time over that of the baseline.
        aim: A lower ratio, shown as a second target.
        tolerance: Largest error of both files, relative to the largest output.

    Returns:
        A record without its metadata: {'times_ms', 'peak_mb', 'floor', 'metrics'}.
    """
    read = random_classifier(name)
    randomize_norms(read.model)
    with set_exportable(runtime == 'ncnn'):                # its usual form has reshapes that pnnx cannot convert
        other = timm.create_model(baseline).eval()
    other.load_state_dict(read.model.state_dict())
    fuse_norms(other)
    subject = with_file_metadata(classifier_subject(read, 'random'), runtime)
    image = subject.example()
    with torch.no_grad():
        expected = subject.eager(image)[0]
        with tempfile.TemporaryDirectory(prefix='subquad-bench-') as folder:
            own, path = (Path(folder) / f'{whose}{FORMATS[runtime].suffix}' for whose in ('own', 'timm'))
            exporter = formats.exporter(runtime)
            exporter.convert(subject, Options(), own)
            with silence():
                _EXPORTS[runtime](other, image, path)
            calls: Dict[str, Run] = {name: exporter.load(own, 1), baseline: _LOADS[runtime](path)}
            for key, call in calls.items():
                _, error = difference(torch.as_tensor(call(image)[0]), expected, 'logits')
                if not error <= tolerance:
                    raise UserError(f'the {runtime} file of {key} differs from the model by {error:.1e}, relative to '
                                    f'its largest output; {tolerance:g} is allowed')
            times = time_interleaved({key: partial(call, image) for key, call in calls.items()}, repeats)
    ratio = speedup(times, baseline, name)                # time of the model over time of the baseline
    return {'times_ms': times, 'peak_mb': {}, 'floor': None, 'metrics': [
        metric(f'{name}: time / time of {baseline}', ratio, 'x', at_most=max_ratio),
        metric(f'{name}: time / time of {baseline} (aim)', ratio, 'x', at_most=aim)]}


def _export_onnx(model: nn.Module, image: Tensor, path: Path) -> None:
    torch.onnx.export(model, (image,), dynamo=True, verbose=False).save(str(path))


def _load_onnx(path: Path) -> Run:
    from subquad.tools.exporters.to_onnx import open_session
    session = open_session(path)
    return lambda image: session.run(None, {session.get_inputs()[0].name: image.numpy()})


def _export_openvino(model: nn.Module, image: Tensor, path: Path) -> None:
    import openvino
    _export_onnx(model, image, path.with_suffix('.onnx'))
    openvino.save_model(openvino.Core().read_model(path.with_suffix('.onnx')), path, compress_to_fp16=False)


def _load_openvino(path: Path) -> Run:
    import openvino
    model = openvino.compile_model(path, 'CPU', dict(FORMATS['openvino'].exact, INFERENCE_NUM_THREADS=1, NUM_STREAMS=1))
    return lambda image: list(model(image.numpy()).values())


def _export_ncnn(model: nn.Module, image: Tensor, path: Path) -> None:
    import pnnx
    traced = path.with_name('timm.pt')
    torch.jit.trace(model, image).save(str(traced))
    shape = ','.join(map(str, image.shape))
    subprocess.run([pnnx.EXEC_PATH, traced.name, f'inputshape=[{shape}]', 'fp16=0'], cwd=path.parent, check=True)


def _load_ncnn(path: Path) -> Run:
    import ncnn
    net = ncnn.Net()
    net.opt.num_threads, net.opt.use_vulkan_compute = 1, False
    for option, value in FORMATS['ncnn'].exact.items():
        setattr(net.opt, option, value)
    net.load_param(str(path))
    net.load_model(str(path.with_suffix('.bin')))

    def run(image: Tensor) -> List[Any]:
        extractor = net.create_extractor()
        extractor.input('in0', ncnn.Mat(image[0].numpy()).clone())
        return [np.array(extractor.extract('out0')[1])[None]]
    return run


def _export_executorch(model: nn.Module, image: Tensor, path: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    edge = to_edge_transform_and_lower(torch.export.export(model, (image,)), partitioner=[XnnpackPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)


def _load_executorch(path: Path) -> Run:
    """The pool of threads is common to all programs; loading the other file has set it to one thread."""
    from executorch.runtime import Runtime
    program = Runtime.get().load_program(path.read_bytes())
    method = program.load_method('forward')

    def run(image: Tensor, keep: Any = program) -> List[Tensor]:
        return method.execute([image])
    return run


def _export_litert(model: nn.Module, image: Tensor, path: Path) -> None:
    _export_onnx(model, image, path.with_name('timm.onnx'))
    # onnx2tf compares the graphs on images that it downloads, unless they are here.
    np.save(path.with_name('calibration_image_sample_data_20x128x128x3_float32.npy'),
            np.random.default_rng(0).random((20, 128, 128, 3), 'f'))
    subprocess.run(['onnx2tf', '-i', 'timm.onnx', '-o', 'tf', '-n'], cwd=path.parent, check=True)
    (path.parent / 'tf' / 'timm_float32.tflite').rename(path)


def _load_litert(path: Path) -> Run:
    from ai_edge_litert.interpreter import Interpreter
    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    (given,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(image: Tensor) -> List[Any]:
        interpreter.set_tensor(given['index'], image.permute(0, 2, 3, 1).contiguous().numpy())
        interpreter.invoke()
        return [interpreter.get_tensor(result['index'])]
    return run


_EXPORTS = {'onnx': _export_onnx, 'openvino': _export_openvino, 'executorch': _export_executorch,
            'litert': _export_litert, 'ncnn': _export_ncnn}
_LOADS = {'onnx': _load_onnx, 'openvino': _load_openvino, 'executorch': _load_executorch,
          'litert': _load_litert, 'ncnn': _load_ncnn}
