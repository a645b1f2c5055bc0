"""Packaging. The checkout's folders are mapped into one import package: `kernels`, `tools` and `configs` would collide
with other projects' packages if they were installed under those names.

`SUBQUAD_URL=https://github.com/OWNER/subquad python -m build` makes the links of the package index's page absolute.
"""
import os
import re
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


def long_description(readme: str, url: str, tag: str) -> str:
    """README.md for the package index, on whose page a relative link leads nowhere.

    Args:
        readme: the text of README.md.
        url: the repository's address; '' where it is not known.
        tag: the git tag that links point to.

    Returns:
        The text with absolute links. Without an address, relative links become plain text, pictures are left out, and
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


# The lower bounds were tried together (.ci/lowest): timm 1.0.28 and older lack what backbones/_timm.py uses.
core = ['torch>=2.9', 'timm>=1.0.29', 'numpy>=1.26', 'safetensors>=0.4', 'huggingface_hub>=0.24', 'pillow', 'rich>=13',
        'triton>=3.5; sys_platform == "linux"']
train = ['onedl-mmengine>=0.10.11', 'opencv-python-headless']     # mmengine imports cv2 without asking for it
demo = [*train, 'scikit-learn>=1.4', 'matplotlib>=3.8', 'mlxtend>=0.23']
# Compiled on installation, by .ci/setup: see the README.
mm = [*train, 'onedl-mmcv>=2.3', 'onedl-mmdetection>=3.5', 'onedl-mmsegmentation>=1.4', 'scikit-image>=0.24',
      'scikit-learn>=1.4']
completion = ['argcomplete>=3']
test = [*demo, *mm, *completion, 'pytest>=8', 'pytest-xdist>=3.6', 'ruff>=0.6']
if __name__ == '__main__':           # as build backends run it; tests import the functions
    setup(
        name='subquad',
        version=version(),
        description='Sub-quadratic vision backbones on one folder of kernels',
        long_description=long_description((ROOT / 'README.md').read_text(), os.environ.get('SUBQUAD_URL', ''),
                                          f'v{version()}'),
        long_description_content_type='text/markdown',
        license='Apache-2.0',
        python_requires='>=3.10',
        packages=packages(),
        py_modules=['subquad_cli'],        # light: `subquad --help` does not wait for torch
        package_dir={'subquad': 'subquad', **{f'subquad.{folder}': folder for folder in FOLDERS}},
        package_data={'subquad.configs': ['*/*.py', '*/*.yml', '*/*.md', '*/_base_/*.py', '*/_base_/*/*.py']},
        install_requires=core,
        extras_require={
            'train': train,
            'mm': mm,
            'export': ['onnx>=1.20', 'onnxscript>=0.5', 'onnxruntime>=1.23'],
            'demo': demo,
            'completion': completion,
            'test': test,
            'dev': test,
        },
        entry_points={'console_scripts': ['subquad = subquad_cli:main']},
        classifiers=['Programming Language :: Python :: 3', 'Topic :: Scientific/Engineering :: Image Recognition'],
    )
