"""Write LiteRT (TFLite) files, which take images (1, H, W, C) as TFLite's tools do.

The metadata is in a zip archive at the end of the file, as TensorFlow Lite stores it, and TFLite's own in the network.
"""
import json
import os
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..common.cli import UserError, one_line, shown
from .formats import Conversion, Options
from .graph import LARGEST_RANK, export_program, silence
from .subject import Subject

_METADATA = 'subquad.json'       # in the archive
_DELEGATE = 'DELEGATE'           # the interpreter lists the delegate's calls among the operators


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write a `.tflite` file with the metadata at its end.

    With fp16, the weights of convolutions and linear layers have half precision, and the arithmetic is float32. With
    int8, these layers compute with 8-bit integers, whose ranges images give; with dynamic8, the weights are stored so,
    and the values are rounded to the range of each image.
    """
    export_program(subject)                                  # its checks hold for every format
    with silence():
        import litert_torch

        from . import litert_metadata
        named, name = _Named(subject.module, subject.outputs).eval(), subject.metadata['input']['name']
        litert_torch.convert(named, sample_kwargs={name: _channels_last(subject.example())}).export(str(path))
        if options.precision != 'fp32':
            _requantize(path, options, name)
        litert_metadata.add_metadata(path, subject.metadata)
    with zipfile.ZipFile(path, 'a', zipfile.ZIP_STORED) as archive:
        archive.writestr(_METADATA, json.dumps(subject.metadata, ensure_ascii=False))
        for name, text in litert_metadata.associated_files(subject.metadata).items():
            archive.writestr(name, text)
    return Conversion(_operators(path))


def _channels_last(images: Tensor) -> Tensor:
    """Return images (B, C, H, W) as (B, H, W, C)."""
    return images.permute(0, 2, 3, 1).contiguous()


class _Named(nn.Module):
    """A module on images (1, H, W, C) whose argument and results have the names of the file's tensors."""

    def __init__(self, module: nn.Module, names: Sequence[str]):
        super().__init__()
        self.module, self.names = module, names

    def forward(self, image: Tensor) -> Dict[str, Tensor]:
        with _Rows():
            return dict(zip(self.names, self.module(image.permute(0, 3, 1, 2))))


class _Rows(TorchFunctionMode):
    """Let linear layers take a map of one token, (1, 1, 1, C), as a row (1, C): the converter fails on the map."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args[0].numel() == args[0].shape[-1]:
            x, *rest = args
            return func(x.reshape(1, -1), *rest, **kwargs).reshape(*x.shape[:-1], -1)
        return func(*args, **kwargs)


def load(path: Path, threads: int = 1) -> Callable[[Tensor], List[Tensor]]:
    """Return a function that runs the file on images (1, C, H, W), float32, and returns the list of its outputs."""
    run, metadata = _interpreter(path, threads).get_signature_runner(), read_metadata(path)
    name, (batch, height, width, channels) = metadata['input']['name'], metadata['input']['shape']
    shape = (batch, channels, height, width)

    def infer(images: Tensor) -> List[Tensor]:
        if tuple(images.shape) != shape:
            raise UserError(f'{path.name} takes images of shape {shape}, got {tuple(images.shape)}')
        results = run(**{name: _channels_last(images).numpy()})
        results = [torch.from_numpy(results[output['name']]) for output in metadata['outputs']]
        return [result if result.is_floating_point() else result.long() for result in results]
    return infer


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata at the end of the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return json.loads(archive.read(_METADATA))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f'{path} holds no metadata of subquad ({one_line(error)})') from error


def _interpreter(path: Path, threads: int = 1, **options: Any) -> Any:
    with silence():
        from ai_edge_litert.interpreter import Interpreter
        try:
            interpreter = Interpreter(model_path=str(path), num_threads=threads, **options)
            interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise UserError(f'{path} is not a file for LiteRT: {shown(one_line(error))}') from error
    return interpreter


def _operators(path: Path) -> Dict[str, int]:
    """Return the number of operators by name."""
    from ai_edge_litert.interpreter import OpResolverType
    plain = _interpreter(path, experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    rank = max(len(tensor['shape']) for tensor in plain.get_tensor_details())
    if rank > LARGEST_RANK:
        raise UserError(f'the converted graph holds a tensor of {rank} dimensions; GPU delegates of LiteRT take '
                        f'{LARGEST_RANK} at most')
    names = Counter(operator['op_name'] for operator in plain._get_ops_details())
    return {name: count for name, count in names.items() if name != _DELEGATE}


# What is quantized. Norms, softmax and attention keep float32: their values span ranges that 8 bits do not cover.
_QUANTIZED = ('CONV_2D', 'DEPTHWISE_CONV_2D', 'FULLY_CONNECTED')


def _requantize(path: Path, options: Options, name: str) -> None:
    """Change the precision of convolutions and linear layers in a file; `name` is that of its input."""
    from ai_edge_quantizer import qtyping, quantizer
    from ai_edge_quantizer.algorithm_manager import AlgorithmName
    work, kinds = quantizer.Quantizer(str(path)), qtyping.TFLOperationName
    if options.precision == 'fp16':
        work.update_quantization_recipe(
            regex='.*',
            operation_name=kinds.ALL_SUPPORTED,
            op_config=qtyping.OpQuantizationConfig(
                weight_tensor_config=qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT),
                compute_precision=qtyping.ComputePrecision.FLOAT,
                explicit_dequantize=True,
            ),
            algorithm_key=AlgorithmName.FLOAT_CASTING,
        )
    for kind in _QUANTIZED if options.precision != 'fp16' else ():
        if options.precision == 'int8':
            work.add_static_config('.*', kinds[kind], activation_num_bits=8, weight_num_bits=8)
        else:
            work.add_dynamic_config('.*', kinds[kind], num_bits=8)
    images = [{name: _channels_last(image).numpy()} for image in options.calibration]
    ranges = work.calibrate({'serving_default': images}) if images else None
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        changed = Path(folder) / path.name
        work.quantize(ranges).export_model(str(changed))
        os.replace(changed, path)
