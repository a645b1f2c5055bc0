"""Latency of exported models against timm's implementation with the same weights, in the same runtime."""
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List

import timm
import torch
from torch import Tensor, nn

from subquad.tools.bench.measure import time_interleaved
from subquad.tools.bench.metrics import metric, speedup
from subquad.tools.common.cli import UserError
from subquad.tools.exporters import formats
from subquad.tools.exporters.formats import Options
from subquad.tools.exporters.pipeline import difference, with_file_metadata
from subquad.tools.exporters.subject import classifier_subject, fuse_norms, random_classifier

from .export_matrix import randomize_norms

Run = Callable[[Tensor], Any]


def exported_models(repeats: int, *, name: str, baseline: str, runtime: str, max_ratio: float, aim: float,
                    tolerance: float = 1e-4) -> Dict[str, Any]:
    """Export a model with `subquad export`'s functions and timm's model as timm's users do, and time both files.

    BatchNorm is fused in both. timm's model is exported by PyTorch's exporter or ExecuTorch's lowering to XNNPACK,
    without further rewriting.

    Args:
        repeats: Rounds of timing, with one thread and one image.
        name: The model.
        baseline: timm's model, which takes the weights of the model.
        runtime: 'onnx' or 'executorch'.
        max_ratio: Target: median time over that of the baseline.
        aim: A lower ratio, shown as a second target.
        tolerance: Largest error of both files, relative to the largest output.

    Returns:
        A record without its metadata: {'times_ms', 'peak_mb', 'floor', 'metrics'}.
    """
    read = random_classifier(name)
    randomize_norms(read.model)
    other = timm.create_model(baseline).eval()
    other.load_state_dict(read.model.state_dict())
    fuse_norms(other)
    subject = with_file_metadata(classifier_subject(read, 'random'), runtime)
    image = subject.example()
    with torch.no_grad():
        expected = subject.eager(image)[0]
        with tempfile.TemporaryDirectory(prefix='subquad-bench-') as folder:
            own, path = Path(folder) / f'own{_SUFFIXES[runtime]}', Path(folder) / f'timm{_SUFFIXES[runtime]}'
            exporter = formats.exporter(runtime)
            exporter.convert(subject, Options(), own)
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
    from subquad.tools.exporters.graph import silence
    with silence():
        torch.onnx.export(model, (image,), dynamo=True, verbose=False).save(str(path))


def _load_onnx(path: Path) -> Run:
    from subquad.tools.exporters.to_onnx import open_session
    session = open_session(path)
    return lambda image: session.run(None, {session.get_inputs()[0].name: image.numpy()})


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


_SUFFIXES = {'onnx': '.onnx', 'executorch': '.pte'}
_EXPORTS = {'onnx': _export_onnx, 'executorch': _export_executorch}
_LOADS = {'onnx': _load_onnx, 'executorch': _load_executorch}
