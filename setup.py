"""Packaging. The checkout's folders are mapped into one import package: `kernels`, `tools` and `configs` would collide
with other projects' packages if they were installed under those names."""
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
FOLDERS = ('backbones', 'kernels', 'configs', 'tools')


def version() -> str:
    for line in (ROOT / 'subquad' / '__init__.py').read_text().splitlines():
        if line.startswith('__version__'):
            return line.split("'")[1]
    raise RuntimeError('no __version__ in subquad/__init__.py')


def packages():
    names = ['subquad']
    for folder in FOLDERS:
        names += [f'subquad.{folder}', *(f'subquad.{folder}.{p}' for p in find_packages(str(ROOT / folder)))]
    return names


train = ['onedl-mmengine>=0.10.11', 'opencv-python-headless']     # mmengine imports cv2 without asking for it
demo = [*train, 'scikit-learn>=1.4', 'matplotlib>=3.8', 'mlxtend>=0.23']
# Compiled on installation, by .ci/setup: see the README.
mm = [*train, 'onedl-mmcv>=2.3', 'onedl-mmdetection>=3.5', 'onedl-mmsegmentation>=1.4', 'scikit-image>=0.24',
      'scikit-learn>=1.4']
test = [*demo, *mm, 'pytest>=8', 'ruff>=0.6']
setup(
    name='subquad',
    version=version(),
    description='Sub-quadratic vision backbones on one folder of kernels',
    long_description=(ROOT / 'README.md').read_text(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.10',
    packages=packages(),
    package_dir={'subquad': 'subquad', **{f'subquad.{folder}': folder for folder in FOLDERS}},
    package_data={'subquad.configs': ['*/*.py', '*/*.yml', '*/*.md', '*/_base_/*.py', '*/_base_/*/*.py']},
    install_requires=['torch>=2.9', 'timm>=1.0.20', 'safetensors>=0.4', 'huggingface_hub>=0.24', 'numpy', 'pillow',
                      'rich>=13', 'triton>=3.5; sys_platform == "linux"'],
    extras_require={
        'train': train,
        'mm': mm,
        'export': ['onnx>=1.20', 'onnxscript>=0.5', 'onnxruntime>=1.23'],
        'demo': demo,
        'test': test,
        'dev': test,
    },
    entry_points={'console_scripts': ['subquad = subquad.tools.cli:main']},
    classifiers=['Programming Language :: Python :: 3', 'Topic :: Scientific/Engineering :: Image Recognition'],
)
