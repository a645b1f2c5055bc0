"""Write ncnn: `.ncnn.param` holds the graph, `.ncnn.bin` the weights, and a `.json` file beside them the metadata."""
import json
import re
import shutil
import subprocess
import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import torch
from torch import Tensor

from ...backbones.export import with_maps
from ..common.cli import UserError, shown
from .formats import FORMATS, Conversion, Options
from .graph import export_program
from .subject import Subject

_SUFFIX = '.ncnn.param'


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write `path`, which ends with `.ncnn.param`, the weights and the metadata beside it.

    With fp16 the weights are stored in half precision; the arithmetic is float32 on processors without half precision.
    """
    program = export_program(replace(subject, module=with_maps(subject.module)))
    with tempfile.TemporaryDirectory(prefix='subquad-ncnn-') as folder:
        said = _run_pnnx(program, subject, options.precision == 'fp16', Path(folder))
        graph, weights = (Path(folder) / f'model.ncnn.{end}' for end in ('param', 'bin'))
        if not graph.is_file() or not weights.is_file():
            raise UserError(f'pnnx wrote no ncnn file for {subject.name}: {shown(said)}')
        text = _named(graph.read_text(), subject)
        operators = _layers(text)
        # The names of operators that pnnx could not translate hold dots or colons.
        unknown = sorted(kind for kind in operators if not re.fullmatch(r'\w+', kind))
        if unknown:
            raise UserError(f'ncnn has no layers for these operators of {subject.name}: {", ".join(unknown)}')
        path.write_text(text)
        shutil.copyfile(weights, _beside(path, '.ncnn.bin'))
    _beside(path, '.json').write_text(json.dumps(subject.metadata, ensure_ascii=False), encoding='utf-8')
    return Conversion(operators)


def load(path: Path, threads: int = 1) -> Callable[[Tensor], List[Tensor]]:
    """Return a function that runs the file on images (1, C, H, W), float32, and returns the list of its outputs."""
    import ncnn
    metadata = read_metadata(path)
    net = ncnn.Net()
    net.opt.num_threads, net.opt.use_vulkan_compute = threads, False
    for option, value in FORMATS['ncnn'].exact.items():
        setattr(net.opt, option, value)
    weights = _beside(path, '.ncnn.bin')
    if not path.is_file() or not weights.is_file() or net.load_param(str(path)) or net.load_model(str(weights)):
        raise UserError(f'{path} and {weights.name} are not a network for ncnn')
    outputs = [(output['name'], tuple(output['shape'])) for output in metadata['outputs']]

    def run(images: Tensor) -> List[Tensor]:
        if images.shape[0] != 1:
            raise UserError(f'ncnn files take one image at a time, got {images.shape[0]}')
        pixels = np.ascontiguousarray(images[0].numpy())            # `Mat` does not own the memory
        extractor = net.create_extractor()
        extractor.input(metadata['input']['name'], ncnn.Mat(pixels).clone())
        results = []
        for name, shape in outputs:
            code, blob = extractor.extract(name)
            values = np.array(blob)
            if code or values.size != np.prod(shape):
                raise UserError(f'ncnn gives {name} of {path.name} as {values.shape} instead of {shape}')
            results.append(torch.from_numpy(values).float().reshape(shape))
        return results
    return run


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata beside the file."""
    try:
        return json.loads(_beside(path, '.json').read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise UserError(f'{_beside(path, ".json")} with the metadata cannot be read ({error})') from error


def _beside(path: Path, suffix: str) -> Path:
    """Return the file of the same model with another suffix."""
    return path.with_name(path.name.removesuffix(_SUFFIX) + suffix)


def _run_pnnx(program: torch.export.ExportedProgram, subject: Subject, half: bool, folder: Path) -> str:
    """Let pnnx write all its files to a folder, and return the end of what it printed.

    The trace is one of the exported program, where shapes are constants: pnnx computes some of them wrongly."""
    import pnnx
    example = subject.example()
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.mT.default:                     # which pnnx does not know
            node.target, node.args = torch.ops.aten.transpose.int, (*node.args, -2, -1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')                      # the tracer warns of every check of a shape
        traced = torch.jit.trace(program.module(check_guards=False), example, check_trace=False)
        for module in filter(lambda module: module._c._has_method('forward'), traced.modules()):
            for node in module.graph.findAllNodes('aten::alias'):        # without effect, and unknown to pnnx, too
                node.output().replaceAllUsesWith(node.input())
                node.destroy()
        traced.save(str(folder / 'model.pt'))
    shape = ','.join(str(side) for side in example.shape)
    done = subprocess.run(
        [pnnx.EXEC_PATH, 'model.pt', f'inputshape=[{shape}]', f'fp16={int(half)}', 'device=cpu'],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='backslashreplace')
    said = ' '.join(done.stdout.splitlines()[-3:])
    if done.returncode:
        raise UserError(f'pnnx cannot convert {subject.name} (exit code {done.returncode}): {shown(said)}')
    return said


def _named(text: str, subject: Subject) -> str:
    """Give the blobs in0, out0, out1, ... of a `.param` file the names that the metadata have."""
    names = {'in0': subject.metadata['input']['name'], **{f'out{n}': name for n, name in enumerate(subject.outputs)}}
    return re.sub(r'\b(in0|out\d+)\b', lambda found: names[found[0]], text)


def _layers(text: str) -> Dict[str, int]:
    """Return the number of layers by type, from the text of a `.param` file."""
    return dict(Counter(line.split()[0] for line in text.splitlines()[2:] if line.strip()))
