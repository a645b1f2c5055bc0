"""Rename MobileViTv2 weights of the authors' library (cvnets) to timm's keys, which this package uses."""
import re
from typing import Any, Dict

# The number of transformer layers in the last block of stages 3, 4 and 5.
DEPTHS = (2, 4, 3)
_LAYER = {'pre_norm_attn.0.': 'norm1.', 'pre_norm_attn.1.qkv_proj.block.conv.': 'attn.qkv_proj.',
          'pre_norm_attn.1.out_proj.block.conv.': 'attn.out_proj.', 'pre_norm_ffn.0.': 'norm2.',
          'pre_norm_ffn.1.block.conv.': 'mlp.fc1.', 'pre_norm_ffn.3.block.conv.': 'mlp.fc2.'}
_CONVOLUTIONS = {'exp_1x1': 'conv1_1x1', 'conv_3x3': 'conv2_kxk', 'red_1x1': 'conv3_1x1'}


def _timm_key(key: str) -> str:
    """Return timm's name for a key of the authors' library. Unknown keys stay as they are; the loader reports them."""
    key = re.sub(r'^classifier\.(\d+\.)?', 'head.fc.', key)
    key = re.sub(r'^conv_1\.', 'stem.', key)
    key = re.sub(r'^layer_(\d)\.', lambda m: f'stages.{int(m[1]) - 1}.', key)
    key = re.sub(r'\.block\.(exp_1x1|conv_3x3|red_1x1)\.', lambda m: f'.{_CONVOLUTIONS[m[1]]}.', key)
    key = re.sub(r'\.local_rep\.0\.', '.conv_kxk.', key).replace('.local_rep.1.block.conv.', '.conv_1x1.')
    for stage, depth in enumerate(DEPTHS, 2):
        key = key.replace(f'stages.{stage}.1.global_rep.{depth}.', f'stages.{stage}.1.norm.')
    key = re.sub(r'\.global_rep\.(\d+)\.', r'.transformer.\1.', key)
    for theirs, ours in _LAYER.items():
        key = key.replace(theirs, ours)
    return key.replace('.block.conv.', '.conv.').replace('.block.norm.', '.bn.').replace('stem.block.', 'stem.')


def to_timm_keys(weights: Dict[str, Any]) -> Dict[str, Any]:
    """Rename the weights of the authors' library to timm's keys.

    Weights that already have timm's keys come back unchanged. From a detector or segmenter only the encoder is taken.
    """
    if any(key.startswith('encoder.') for key in weights):
        weights = {key.removeprefix('encoder.'): value for key, value in weights.items() if key.startswith('encoder.')}
    if not any(key.startswith('conv_1.') for key in weights):
        return weights
    return {_timm_key(key): value for key, value in weights.items()}
