"""Modules keep to their layer: no circular import, no import of a higher layer, no name used for two things."""
import ast
import sys
from collections import defaultdict

import pytest
from helpers import ROOT

PACKAGES = ('kernels', 'backbones', 'tools', 'lab')
OPERATOR_FILES = {'__init__', 'reference', 'portable'}
# Kernels, and functions that several kernels call.
MORE_KERNELS = {'native', 'triton', 'triton_backward', 'triton_full_rank', 'triton_running', 'triton_tiles'}
# Layers of kernels/, lowest first; a folder that is not named here is an operator's.
KERNEL_LAYERS = {'kernels.common': 0, 'kernels.native': 1, 'kernels.dispatch': 2, 'kernels.trees': 3,
                 'kernels.eos_scan': 3, 'kernels.prepared': 3, 'kernels.tiling': 5}
OPERATOR_LAYER, TOP_LAYER = 4, 5
# Layers of tools/, lowest first. The commands are above them; engine and data do not import each other.
TOOL_LAYERS = {'tools.common': 0, 'tools.engine': 1, 'tools.data': 1, 'tools.exporters': 2, 'tools.bench': 3}
# File names that folders may share: the operators' files, and the same part of classification and of dense prediction.
SHARED_NAMES = OPERATOR_FILES | MORE_KERNELS | {'evaluation', 'prediction', 'registry', 'task'}
# Their names are what users type, so 'kernels' and 'test' stay although a package and a standard module have them.
COMMANDS = {'benchmark', 'demo', 'export', 'kernels', 'logs', 'make_dataset', 'models', 'predict',
            'reproduce', 'stats', 'test', 'train', 'visualize', 'weights'}


def modules():
    """Map the name of every module below PACKAGES, such as 'kernels.trees.grid', to its file."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob('*.py'):
            parts = path.relative_to(ROOT).with_suffix('').parts
            found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
    return found


MODULES = modules()


def _absolute(node: ast.ImportFrom, module: str) -> str:
    """The module that an import names, without the leading 'subquad.'."""
    if not node.level:
        return (node.module or '').removeprefix('subquad.')
    package = module.split('.') if MODULES[module].name == '__init__.py' else module.split('.')[:-1]
    package = package[:len(package) - node.level + 1]
    return '.'.join([*package, *(node.module or '').split('.')]).rstrip('.')


def imports(module: str):
    """Modules of PACKAGES that a module imports, at its top or inside of a function."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            base = _absolute(node, module)
            for alias in node.names:
                name = f'{base}.{alias.name}' if base else alias.name
                if name in MODULES:
                    yield name
                elif base in MODULES:
                    yield base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.removeprefix('subquad.') in MODULES:
                    yield alias.name.removeprefix('subquad.')


def layer(module: str) -> int:
    """Layer of a module of kernels/."""
    if module == 'kernels':
        return TOP_LAYER
    return KERNEL_LAYERS.get('.'.join(module.split('.')[:2]), OPERATOR_LAYER)


def operators():
    """Folders of kernels/ that hold one operator each."""
    return sorted(path for path in (ROOT / 'kernels').iterdir()
                  if path.is_dir() and any(path.glob('*.py')) and layer(f'kernels.{path.name}') == OPERATOR_LAYER)


def find_cycle(graph):
    """Return the modules of a circle of imports, or None."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return path[path.index(node):]
        if node in done:
            return None
        path.append(node)
        for after in graph.get(node, ()):
            cycle = visit(after)
            if cycle:
                return cycle
        done.add(path.pop())
        return None

    return next((cycle for cycle in map(visit, graph) if cycle), None)


def test_relative_imports_name_modules_that_exist():
    """Also those inside of functions, which fail only when the function runs."""
    missing = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = _absolute(node, module)
                names = [f'{base}.{alias.name}'.lstrip('.') for alias in node.names]
                if base not in MODULES and not all(name in MODULES for name in names) and base:
                    missing.append(f'{module}: {ast.unparse(node)}')
    assert missing == []


def test_every_operator_has_a_declaration_and_a_reference():
    """And what it needs beside them: a portable form, kernels, functions that they share."""
    from subquad import kernels
    assert {path.name for path in operators()} == set(kernels.__all__) - {'use_backend', 'why_not'}
    for path in operators():
        assert OPERATOR_FILES - {'portable'} <= {file.stem for file in path.glob('*.py')}, path.name


@pytest.mark.parametrize('package, above', [
    ('kernels', {'backbones', 'tools', 'lab'}), ('backbones', {'tools', 'lab'}), ('tools', {'lab'})])
def test_no_package_imports_one_above_it(package, above):
    upwards = [(module, name) for module in MODULES if module.split('.')[0] == package
               for name in imports(module) if name.split('.')[0] in above]
    assert upwards == []


def test_kernels_import_lower_layers_only():
    upwards = [(module, name) for module in MODULES if module.startswith('kernels')
               for name in imports(module) if name.startswith('kernels') and layer(name) > layer(module)]
    assert upwards == []


def test_tools_import_lower_layers_only():
    def folder(module):
        return '.'.join(module.split('.')[:2])

    def floor(module):
        return TOOL_LAYERS.get(folder(module), 4)

    def allowed(module, name):
        return floor(name) < floor(module) or folder(name) == folder(module)

    upwards = [(module, name) for module in MODULES if module.startswith('tools.')
               for name in imports(module) if name.startswith('tools.') and not allowed(module, name)]
    assert upwards == []


def test_tools_has_commands_and_five_folders():
    entries = {path.stem for path in (ROOT / 'tools').iterdir() if path.suffix == '.py' or any(path.glob('*.py'))}
    assert entries == COMMANDS | {'__init__', 'common', 'engine', 'data', 'exporters', 'bench'}


@pytest.mark.parametrize('package', PACKAGES)
def test_no_circular_import(package):
    """Imports inside of functions count. A package's `__init__` may import its modules, and these its other modules."""
    graph = {module: [name for name in imports(module) if name != module and not module.startswith(f'{name}.')]
             for module in MODULES if module.split('.')[0] == package}
    assert find_cycle(graph) is None


def test_find_cycle_finds_one():
    assert find_cycle({'a': ['b'], 'b': ['c'], 'c': ['b']}) == ['b', 'c']
    assert find_cycle({'a': ['b', 'c'], 'b': ['c']}) is None


def test_no_circular_import_between_operators():
    folders = {path.name for path in operators()}
    graph = defaultdict(set)
    for module in MODULES:
        owner = module.split('.')[1:2]
        if module.startswith('kernels.') and owner[0] in folders:
            graph[owner[0]] |= {name.split('.')[1] for name in imports(module)
                                if name.startswith('kernels.') and name.split('.')[1] in folders - set(owner)}
    assert find_cycle(dict(graph)) is None


def _commands():
    return {f'tools.{name}' for name in COMMANDS}


def test_no_file_has_the_name_of_a_module_of_the_standard_library():
    stems = {path.stem for module, path in MODULES.items() if module not in _commands()}
    assert stems & set(sys.stdlib_module_names) == set()


def test_no_file_name_means_two_things():
    places = defaultdict(list)
    for module, path in MODULES.items():
        if path.name != '__init__.py' and path.stem not in SHARED_NAMES and module not in _commands():
            places[path.stem].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
