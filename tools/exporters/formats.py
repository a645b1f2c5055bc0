"""The formats: their files, their extras, and what each one supports."""
import importlib
import importlib.util
import sys
from types import MappingProxyType, ModuleType
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from torch import Tensor

from ..common.cli import UserError

PRECISIONS = ('fp32', 'fp16', 'int8', 'dynamic8', 'palette6', 'palette4')
DYNAMIC = ('batch', 'hw')


class Options(NamedTuple):
    """What a user asks of an export.

    Attributes:
        precision: one of `PRECISIONS`; None lets `chosen_formats` take the format's own. Inputs and outputs of the file
            do not depend on it.
        dynamic: the dimensions that the file leaves open: 'batch', and 'hw' for height and width.
        calibration: preprocessed images (1, C, H, W), float32, from which int8 quantization takes its ranges.
    """
    precision: Optional[str] = 'fp32'
    dynamic: FrozenSet[str] = frozenset()
    calibration: Sequence[Tensor] = ()


class Conversion(NamedTuple):
    """What a conversion tells about the file that it has written.

    Attributes:
        operators: number of operators in the file's graph, by name. For ExecuTorch, of those that are not delegated.
        delegates: number of calls to a delegate.
        delegated_macs: share of the multiply-adds that a delegate computes, from 0 to 1; None without delegation.
    """
    operators: Dict[str, int]
    delegates: int = 0
    delegated_macs: Optional[float] = None


class Format(NamedTuple):
    """One file format.

    Attributes:
        title: name of the runtime.
        suffix: end of the file name.
        module: module of this package with `convert(subject, options, path)`, `load(path, threads)` and
            `read_metadata(path)`.
        packages: modules that conversion and runtime import.
        distributions: what pip installs for them; an extra of this package has them. Formats of PyTorch need none.
        precisions: the precisions that it supports; the first is the default.
        dynamic: the dimensions that a file may leave open.
        exact: options of the runtime without which files of fp32 lose digits, by their names in the runtime.
        integers: dtype of outputs that are integers.
        layout: order of the dimensions of the input.
        runs: whether the command runs its files on a runtime. If not, the module has `check(path)` instead of `load`.
        calibrates: whether int8 takes the ranges of values from images.
    """
    title: str
    suffix: str
    module: str
    packages: Tuple[str, ...]
    distributions: Tuple[str, ...]
    precisions: Tuple[str, ...]
    dynamic: Tuple[str, ...]
    exact: Mapping[str, Any] = MappingProxyType({})
    integers: str = 'int64'
    layout: str = 'NCHW'
    runs: bool = True
    calibrates: bool = True


_ONNX, _USUAL = ('onnx', 'onnxscript', 'onnxruntime'), PRECISIONS[:3]
FORMATS: Dict[str, Format] = {
    'onnx': Format('ONNX Runtime', '.onnx', 'to_onnx', _ONNX, _ONNX, _USUAL, DYNAMIC),
    'ort': Format('ONNX Runtime Mobile', '.ort', 'to_onnx', _ONNX, _ONNX, _USUAL, DYNAMIC),
    # Its optimizer removes the check of height and width.
    'openvino': Format('OpenVINO', '.xml', 'to_openvino', (*_ONNX, 'openvino'), (*_ONNX, 'openvino'), _USUAL,
                       ('batch',), {'INFERENCE_PRECISION_HINT': 'f32'}),
    'pt2': Format('PyTorch', '.pt2', 'to_pt2', (), (), ('fp32',), DYNAMIC),
    # Compiled programs do not check sizes.
    'aoti': Format('PyTorch AOTInductor', '.aoti.pt2', 'to_pt2', (), (), ('fp32',), ('batch',)),
    # XNNPACK cannot slice or reshape maps of unknown height and width.
    'executorch': Format('ExecuTorch with XNNPACK', '.pte', 'to_executorch', ('executorch', 'torchao'),
                         ('executorch',), _USUAL, ('batch',)),
    'litert': Format('LiteRT', '.tflite', 'to_litert', ('litert_torch', 'ai_edge_litert'), ('litert-torch',),
                     PRECISIONS[:4], (), integers='int32', layout='NHWC'),
    'ncnn': Format('ncnn', '.ncnn.param', 'to_ncnn', ('pnnx', 'ncnn'), ('pnnx', 'ncnn'), ('fp32', 'fp16'), (),
                   dict.fromkeys(('use_fp16_packed', 'use_fp16_storage', 'use_fp16_arithmetic', 'use_bf16_storage'),
                                 False)),
    # The converter writes height and width into reshapes.
    'coreml': Format('Core ML', '.mlpackage', 'to_coreml', ('coremltools',), ('coremltools',),
                     ('fp16', 'fp32', 'int8', 'palette6', 'palette4'), ('batch',), integers='int32', runs=False,
                     calibrates=False),
}
# Their files select the detections of a detector; the others return all boxes and scores.
WITH_NMS = ('onnx', 'ort', 'openvino', 'pt2', 'aoti')


def format_of(name: str) -> Optional[str]:
    """Return the format of an exported file by its suffix; None for other names."""
    found = [key for key, form in FORMATS.items() if name.endswith(form.suffix)]
    return max(found, key=lambda key: len(FORMATS[key].suffix), default=None)


def missing_packages(name: str) -> List[str]:
    """Return the modules of a format that are not installed."""
    return [package for package in FORMATS[name].packages if importlib.util.find_spec(package) is None]


def _check_installed(name: str) -> None:
    missing = missing_packages(name)
    if missing:
        raise UserError(f'the format {name} needs {" and ".join(missing)}: '
                        f"pip install {' '.join(FORMATS[name].distributions)}")
    if name == 'aoti':
        from torch._inductor.cpp_builder import get_cpp_compiler
        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise UserError('the format aoti needs a C++ compiler, and none was found: install g++, or name a compiler '
                            'in the environment variable CXX') from error


def exporter(name: str) -> ModuleType:
    """Import the module of a format.

    Raises:
        UserError: Packages or the compiler of the format are not installed.
    """
    _check_installed(name)
    return importlib.import_module(f'{__package__}.{FORMATS[name].module}')


def check_options(name: str, options: Options) -> None:
    """Refuse what a format does not support.

    Raises:
        UserError: The format has no such precision or no such dynamic dimension.
    """
    form = FORMATS[name]
    if options.precision not in form.precisions:
        raise UserError(f'the format {name} has no precision {options.precision} here; '
                        f'allowed are {", ".join(form.precisions)}')
    refused = sorted(options.dynamic - set(form.dynamic))
    if refused:
        allowed = f'only {", ".join(form.dynamic)} may be dynamic' if form.dynamic else 'all shapes are static'
        raise UserError(f'the format {name} does not support --dynamic {" ".join(refused)}: {allowed}')


def chosen_formats(names: Sequence[str], options: Options) -> Dict[str, Options]:
    """Return the formats to write, with their options; for 'all', those that are installed and support the options.

    Formats that 'all' leaves out are named on stderr.

    Raises:
        UserError: A named format is not installed or does not support the options, or 'all' leaves none.
    """
    chosen = {}
    for name in FORMATS if 'all' in names else dict.fromkeys(names):
        own = options._replace(precision=options.precision or FORMATS[name].precisions[0])
        try:
            check_options(name, own)
            _check_installed(name)
        except UserError as error:
            if 'all' not in names:
                raise
            print(f'left out: {error}', file=sys.stderr)
        else:
            chosen[name] = own
    if not chosen:
        raise UserError('no installed format supports these options (see above)')
    return chosen
