"""Packaging. The checkout's folders are mapped into one import package, because packages named `kernels`, `tools` and
`configs` would collide with those of other projects.

`SUBQUAD_URL=https://github.com/OWNER/subquad python -m build` adds the project's links to the package index's page.
"""
import hashlib
import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Dict

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError

ROOT = Path(__file__).resolve().parent
FOLDERS = ('backbones', 'kernels', 'configs', 'tools')
# Files beside the modules; `subquad weights push` fills the template of the model cards.
DATA = {
    'subquad.configs': ['*/*.py', '*/*.yml', '*/*.md', '*/_base_/*.py', '*/_base_/*/*.py'],
    'subquad.kernels.common': ['*.json'],
    'subquad.backbones.weights': ['shipped/*.safetensors'],
    'subquad.model_cards': ['*.md', 'template/*.md'],
}


def version() -> str:
    for line in (ROOT / 'subquad' / '__init__.py').read_text().splitlines():
        if line.startswith('__version__'):
            return line.split("'")[1]
    raise RuntimeError('no __version__ in subquad/__init__.py')


def packages():
    names = ['subquad', 'subquad.model_cards']
    for folder in FOLDERS:
        names += [f'subquad.{folder}', *(f'subquad.{folder}.{p}' for p in find_packages(str(ROOT / folder)))]
    return names


def long_description(readme: str, url: str, tag: str) -> str:
    """Return README.md for the package index, where relative links do not work.

    Args:
        readme: The text of README.md.
        url: The repository's address, or '' if it is not known.
        tag: The git tag that the links point to.

    Returns:
        The text with absolute links. Without an address, relative links become plain text, pictures are removed, and
        a sentence says where to find them.
    """
    def replace(match: 're.Match[str]') -> str:
        image, text, target = match.groups()
        if re.match('https?://', target):
            return match[0]
        if url:
            path = f"{'raw' if image else 'blob'}/{tag}/{'README.md' if target.startswith('#') else ''}"
            return f"{image}[{text}]({url.rstrip('/')}/{path}{target})"
        return '' if image else text
    text = re.sub(r'(!?)\[([^\]]*)\]\(([^)\s]+)\)', replace, readme)
    return text if url else text + '\nThe pictures and the files named here are in the source distribution.\n'


def project_urls(url: str, tag: str) -> Dict[str, str]:
    """Return the links that the package index shows beside the description; none without an address."""
    if not url:
        return {}
    url = url.rstrip('/')
    return {'Source': url, 'Documentation': f'{url}/tree/{tag}/docs', 'Changelog': f'{url}/blob/{tag}/CHANGELOG.md',
            'Issues': f'{url}/issues'}


def native_sources() -> str:
    """Return a digest of the C++ sources, by which the package knows whether a library was built from its own."""
    files = sorted(path for path in ROOT.glob('kernels/*/*') if path.suffix in ('.cpp', '.h'))
    return hashlib.sha256(b''.join(path.read_bytes() for path in files)).hexdigest()


class BuildNative(build_ext):
    """Compile the native operators, once for each instruction set. Without a compiler, they are left out."""

    def build_extension(self, extension: Extension) -> None:
        x86 = platform.machine().lower() in ('x86_64', 'amd64')
        sets = {'avx2': ['-march=x86-64-v3'], 'avx512': ['-march=x86-64-v4']} if x86 else {'plain': []}
        flags = ['-std=c++17', '-O3', '-g0', '-fno-math-errno', '-ffp-contract=fast', '-fno-exceptions', '-fno-rtti']
        common, *operators = extension.sources
        # A macro with an argument gives each function the name of its instruction set.
        jobs = [(common, self.build_temp, [f'-DSUBQUAD_SOURCES="{native_sources()}"']),
                *((source, f'{self.build_temp}/{name}', [*march, f'-DSUBQUAD_NAME(operator)=operator##_{name}'])
                  for name, march in sets.items() for source in operators)]
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(chain.from_iterable(pool.map(lambda job: self.compiler.compile(
                    [job[0]], job[1], extra_postargs=[*flags, *job[2]]), jobs)))
            path = self.get_ext_fullpath(extension.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self.compiler.link_shared_object(objects, path)
        except (CompileError, ExecError, LinkError) as error:
            print('subquad: the native operators for CPUs are not built, and PyTorch takes their place: they need GCC '
                  f'12 or Clang 15 or newer ({error})', file=sys.stderr)


# The lower bounds are tested together (.ci/lowest): timm 1.0.28 and older lack what backbones/_timm.py uses.
core = ['torch>=2.9', 'timm>=1.0.29', 'numpy>=1.26', 'safetensors>=0.4', 'huggingface_hub>=0.24',
        'filelock>=3.12', 'pillow', 'rich>=13', 'triton>=3.5; sys_platform == "linux"']
train = ['onedl-mmengine>=0.10.11', 'opencv-python-headless']     # MMEngine imports cv2 without asking for it
demo = [*train, 'scikit-learn>=1.4', 'matplotlib>=3.8', 'mlxtend>=0.23']
# mmcv is compiled on installation, by .ci/setup; see docs/installation.md.
mm = [*train, 'onedl-mmcv>=2.3', 'onedl-mmdetection>=3.5', 'onedl-mmsegmentation>=1.4', 'scikit-image>=0.24',
      'scikit-learn>=1.4']
completion = ['argcomplete>=3']
onnx = ['onnx>=1.23', 'onnxscript>=0.7.2', 'onnxruntime>=1.31']
# One extra for each format of `subquad export`. LiteRT is not part of `export`: it brings JAX and Transformers, 1.1 GB.
formats = {
    'onnx': onnx,
    'openvino': [*onnx, 'openvino>=2026.4'],          # converted from the ONNX model
    'executorch': ['executorch>=1.5.1'],
    'ncnn': ['pnnx>=20261020', 'ncnn>=1.0.20261020'],
    'coreml': ['coremltools>=9.0'],
    'litert': ['litert-torch>=0.10'],
}
export = [package for name, packages in formats.items() if name != 'litert' for package in packages]
test = [*demo, *mm, *completion, *export, 'onedl-mmpretrain>=1.3', 'webdataset>=1', 'pytest>=8', 'pytest-xdist>=3.6',
        'jsonschema>=4', 'ruff>=0.6']
docs = ['mkdocs>=1.6', 'mkdocs-material>=9.5', 'mkdocstrings[python]>=1.0']
dev = [*test, *docs, 'pre-commit>=4']
if __name__ == '__main__':           # as build backends run it; tests import the functions
    setup(
        name='subquad',
        version=version(),
        description='Sub-quadratic vision backbones for timm, MMDetection and MMSegmentation, with Triton kernels',
        author='the subquad developers',
        long_description=long_description((ROOT / 'README.md').read_text(), os.environ.get('SUBQUAD_URL', ''),
                                          f'v{version()}'),
        long_description_content_type='text/markdown',
        project_urls=project_urls(os.environ.get('SUBQUAD_URL', ''), f'v{version()}'),
        license='Apache-2.0',
        python_requires='>=3.10',
        packages=packages(),
        py_modules=['subquad_cli'],        # light: `subquad --help` does not wait for torch
        package_dir={'subquad': 'subquad', **{f'subquad.{folder}': folder for folder in (*FOLDERS, 'model_cards')}},
        package_data=DATA,
        ext_modules=[Extension('subquad.kernels.native.operators', [
            'kernels/native/threads.cpp',
            *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob('kernels/*/native*.cpp'))),
        ], depends=[str(path.relative_to(ROOT)) for path in sorted(ROOT.glob('kernels/*/*.h'))], optional=True)],
        cmdclass={'build_ext': BuildNative},
        install_requires=core,
        extras_require={
            'train': train,
            'mm': mm,
            **formats,
            'export': export,
            'demo': demo,
            'completion': completion,
            'test': test,
            'docs': docs,
            'dev': dev,
        },
        entry_points={'console_scripts': ['subquad = subquad_cli:main']},
        classifiers=['Programming Language :: Python :: 3', 'Topic :: Scientific/Engineering :: Image Recognition'],
    )
