_base_ = 'upernet_ppma-s_8xb2-160k_ade20k-512x512.py'

# Tested on whole images, as published.
model = dict(backbone=dict(type='RMT'), test_cfg=dict(_delete_=True, mode='whole'))
# BatchNorm of the backbone is synchronized between GPUs, too, as published.
sync_bn = 'torch'
