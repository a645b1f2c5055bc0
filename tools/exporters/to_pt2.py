"""Write archives of PyTorch (.pt2): the graph of torch.export, or machine code that AOTInductor compiles from it."""
import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
from torch import Tensor

from ..common.cli import UserError, one_line, shown
from .formats import Conversion, Options
from .graph import export_program, silence
from .subject import Subject

_COMPILED = '.aoti.pt2'                 # end of the name of an archive with machine code
_METADATA = 'extra/subquad.json'        # in the archive's only folder, where torch.export.load looks for it
# What torch.export notes beside the graph: lines of the source and paths of this computer.
_NOTES = ('stack_trace', 'nn_module_stack', 'torch_fn')
# By default, the machine code computes with as many threads as the process that compiles it.
_SETTINGS = {'cpp.dynamic_threads': True}


def convert(subject: Subject, options: Options, path: Path) -> Conversion:
    """Write an archive with machine code for this kind of processor if the name ends in `.aoti.pt2`, else the graph."""
    program = export_program(subject, options.dynamic)
    if subject.selection:
        from .dense_heads import SelectingDetector
        with torch.no_grad():
            program = torch.export.export(SelectingDetector(subject.module, subject.size, subject.selection),
                                          (subject.example(),))
    for node in program.graph.nodes:
        for note in _NOTES:
            node.meta.pop(note, None)
    operators = Counter(str(node.target) for node in program.graph.nodes if node.op == 'call_function')
    with silence(), torch.no_grad():
        if path.name.endswith(_COMPILED):
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs={**_SETTINGS})
        else:
            program.example_inputs = None                      # the archive would hold them
            torch.export.save(program, str(path))
    with zipfile.ZipFile(path, 'a', zipfile.ZIP_STORED) as archive:
        folder = archive.namelist()[0].partition('/')[0]
        archive.writestr(f'{folder}/{_METADATA}', json.dumps(subject.metadata, ensure_ascii=False))
    return Conversion(dict(operators.most_common()))


def load(path: Path, threads: int = 1) -> Callable[[Tensor], List[Tensor]]:
    """Return a function that runs the file on images (B, C, H, W), float32, and returns the list of its outputs.

    Archives use the threads of PyTorch, whose number is changed during a call.
    """
    read_metadata(path)                 # refuses other files in one sentence
    with silence(), torch.inference_mode():
        model = (torch._inductor.aoti_load_package(str(path)) if path.name.endswith(_COMPILED) else
                 torch.export.load(str(path)).module())

    def run(images: Tensor) -> List[Tensor]:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            with torch.inference_mode():
                return list(model(images))
        finally:
            torch.set_num_threads(before)
    return run


def read_metadata(path: Path) -> Dict[str, Any]:
    """Return the metadata in the archive; see `subject.describe`."""
    try:
        with zipfile.ZipFile(path) as archive:
            return json.loads(archive.read(f"{archive.namelist()[0].partition('/')[0]}/{_METADATA}"))
    except (OSError, KeyError, IndexError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f'{shown(path)} has no metadata of `subquad export` ({one_line(error)})') from error
