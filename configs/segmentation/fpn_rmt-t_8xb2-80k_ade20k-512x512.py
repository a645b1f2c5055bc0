_base_ = 'fpn_ppma-t_8xb2-80k_ade20k-512x512.py'

model = dict(backbone=dict(type='RMT'))
# BatchNorm of the backbone is synchronized between GPUs, too, as published.
sync_bn = 'torch'
