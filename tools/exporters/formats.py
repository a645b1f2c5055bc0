"""The formats: their files, their extras, and what each one supports."""
import importlib
import importlib.util
from types import ModuleType
from typing import Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from torch import Tensor

from ..common.cli import UserError

PRECISIONS = ('fp32', 'fp16', 'int8')
DYNAMIC = ('batch', 'hw')


class Options(NamedTuple):
    """What a user asks of an export.

    Attributes:
        precision: 'fp32', 'fp16' or 'int8'. Inputs and outputs of the file are float32 in any case.
        dynamic: the dimensions that the file leaves open: 'batch', and 'hw' for height and width.
        calibration: preprocessed images (1, C, H, W), float32, from which int8 quantization takes its ranges.
    """
    precision: str = 'fp32'
    dynamic: FrozenSet[str] = frozenset()
    calibration: Sequence[Tensor] = ()


class Conversion(NamedTuple):
    """What a conversion tells about the file that it has written.

    Attributes:
        operators: number of operators in the file's graph, by name. For ExecuTorch, of those that are not delegated.
        delegates: number of calls to a delegate.
        delegated_macs: share of the multiply-adds that a delegate computes, from 0 to 1; None without delegation.
        notes: sentences for the user.
    """
    operators: Dict[str, int]
    delegates: int = 0
    delegated_macs: Optional[float] = None
    notes: Sequence[str] = ()


class Format(NamedTuple):
    """One file format.

    Attributes:
        title: name of the runtime.
        suffix: end of the file name.
        packages: modules that conversion and runtime import.
        distributions: what pip installs for them; the extra of this package has the name of the format.
        precisions: the precisions that it supports.
        dynamic: the dimensions that a file may leave open.
        runs: whether the command runs its files on a runtime.
    """
    title: str
    suffix: str
    packages: Tuple[str, ...]
    distributions: Tuple[str, ...]
    precisions: Tuple[str, ...]
    dynamic: Tuple[str, ...]
    runs: bool = True


_ONNX = ('onnx', 'onnxscript', 'onnxruntime')
FORMATS: Dict[str, Format] = {
    'onnx': Format('ONNX Runtime', '.onnx', _ONNX, _ONNX, PRECISIONS, DYNAMIC),
    'ort': Format('ONNX Runtime Mobile', '.ort', _ONNX, _ONNX, PRECISIONS, DYNAMIC),
    'executorch': Format('ExecuTorch with XNNPACK', '.pte', ('executorch', 'torchao'), ('executorch',), PRECISIONS,
                         ('batch',)),
    'litert': Format('LiteRT', '.tflite', ('litert_torch', 'ai_edge_litert'), ('litert-torch',), ('fp32', 'fp16'), ()),
    'ncnn': Format('ncnn', '.ncnn.param', ('pnnx', 'ncnn'), ('pnnx', 'ncnn'), ('fp32', 'fp16'), ()),
    'coreml': Format('Core ML', '.mlpackage', ('coremltools',), ('coremltools',), ('fp32', 'fp16'), ('batch',),
                     runs=False),
}


def missing_packages(name: str) -> List[str]:
    """Return the modules of a format that are not installed."""
    return [package for package in FORMATS[name].packages if importlib.util.find_spec(package) is None]


def install_command(name: str) -> str:
    """Return the pip command that installs what a format needs."""
    return f"pip install {' '.join(FORMATS[name].distributions)}"


def exporter(name: str) -> ModuleType:
    """Import the module `to_NAME` of a format.

    Raises:
        UserError: The format is unknown, or its packages are not installed.
    """
    _check_name(name)
    missing = missing_packages(name)
    if missing:
        raise UserError(f'the format {name} needs {" and ".join(missing)}: {install_command(name)}')
    return importlib.import_module(f'{__package__}.to_{name}')


def check_options(name: str, options: Options) -> None:
    """Refuse what a format does not support.

    Raises:
        UserError: The format is unknown, or has no such precision or no such dynamic dimension.
    """
    _check_name(name)
    form = FORMATS[name]
    if options.precision not in form.precisions:
        raise UserError(f'the format {name} has no precision {options.precision} here; '
                        f'allowed are {", ".join(form.precisions)}')
    refused = sorted(options.dynamic - set(form.dynamic))
    if refused:
        allowed = f'only {", ".join(form.dynamic)} may be dynamic' if form.dynamic else 'all shapes are static'
        raise UserError(f'the format {name} does not support --dynamic {" ".join(refused)}: {allowed}')


def _check_name(name: str) -> None:
    if name not in FORMATS:
        raise UserError(f'unknown format {name!r}; allowed are {", ".join(FORMATS)}')
