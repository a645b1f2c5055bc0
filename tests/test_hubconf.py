"""torch.hub loads the models from a checkout, without an installed package and without MMDetection."""
import ast
import os
import re
import subprocess
import sys

from helpers import ROOT

from subquad.tools.engine.zoo import our_models

_LOAD = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]    # only the checkout has subquad
import torch
root = sys.argv[1]
torch.hub._get_cache_or_reload = lambda *args, **kwargs: root        # instead of a download from GitHub
print(*torch.hub.list('owner/subquad'))
print(torch.hub.help('owner/subquad', 'ppma_tiny').strip().splitlines()[0])
model = torch.hub.load(root, 'ppma_tiny', source='local', num_classes=3, device='meta')
small = torch.hub.load(root, 'test_ppma', source='local', num_classes=3, mask_mode='multiplicative')
features = torch.hub.load(root, 'test_mobilevitv2', source='local', features_only=True)
print(type(model).__module__, sum(p.numel() for p in model.parameters()), tuple(small(torch.rand(1, 3, 64, 64)).shape),
      len(features(torch.rand(1, 3, 64, 64))))
digits = torch.hub.load(root, 'test_myo', source='local', pretrained=True, pretrained_cfg='digits')
print(digits.num_classes, bool(digits.head.fc.bias.any()))
print(*(name for name in ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'subquad.tools') if name in sys.modules))
"""


def test_a_checkout_is_a_repository_of_torch_hub(tmp_path):
    """In a process that has no subquad but in the folder that it gives to torch.hub."""
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', _LOAD, str(ROOT)], capture_output=True, text=True,
                          cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = done.stdout.split('\n')
    assert sorted(loaded[0].split()) == sorted(our_models())
    assert loaded[1].startswith('PPMA-T: 14.3 M parameters'), 'the help is the docstring'
    module, parameters, shape, maps = re.fullmatch(r'(\S+) (\d+) (\(.*\)) (\d)', loaded[2]).groups()
    assert module == 'subquad.backbones.ppma' and 13_000_000 < int(parameters) < 14_500_000
    assert shape == '(1, 3)' and maps == '5'
    assert loaded[3] == '10 True', 'weights of the package'
    assert loaded[4] == '', 'no library for dense prediction is needed'


def test_dependencies_are_those_of_the_package():
    """torch.hub names a missing one; all are required by setup.py under these names."""
    tree = ast.parse((ROOT / 'hubconf.py').read_text())
    dependencies = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    required = set(re.findall(r"'([a-z_]+)>=", re.search(r'^core = \[(.*?)\]', (ROOT / 'setup.py').read_text(),
                                                         re.MULTILINE | re.DOTALL)[1]))
    assert set(dependencies) == required - {'triton', 'rich'} and len(dependencies) > 3
