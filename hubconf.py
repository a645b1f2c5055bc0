"""Entry points of torch.hub.

`torch.hub.load(REPOSITORY, 'ppma_tiny', pretrained=True)` builds a model as `timm.create_model` does, with the same
keyword arguments. `REPOSITORY` is `OWNER/subquad`, or the folder of a checkout with `source='local'`. `torch.hub.list`
lists the names, and `torch.hub.help` describes one.
"""
# torch.hub checks these before it loads a model; setup.py names their versions.
dependencies = ['torch', 'timm', 'numpy', 'safetensors', 'huggingface_hub', 'filelock']

from subquad.backbones.lcsm import lcsm_base, lcsm_small, lcsm_tiny, test_lcsm  # noqa: E402, F401
from subquad.backbones.lcsm_sequence import lcsm_sequence  # noqa: E402, F401
from subquad.backbones.mobilevitv2 import (  # noqa: E402, F401
    subquad_mobilevitv2_050,
    subquad_mobilevitv2_075,
    subquad_mobilevitv2_100,
    subquad_mobilevitv2_125,
    subquad_mobilevitv2_150,
    subquad_mobilevitv2_175,
    subquad_mobilevitv2_200,
    test_mobilevitv2,
)
from subquad.backbones.myo import myo_base, myo_small, myo_tiny, test_myo  # noqa: E402, F401
from subquad.backbones.myo_sequence import myo_sequence  # noqa: E402, F401
from subquad.backbones.ppma import (  # noqa: E402, F401
    ppma_base,
    ppma_base_crisscross,
    ppma_small,
    ppma_small_crisscross,
    ppma_tiny,
    ppma_tiny_crisscross,
    test_ppma,
)
