_base_ = 'upernet_ppma-t_8xb2-160k_ade20k-512x512.py'

# Tested on whole images, as published.
model = dict(
    backbone=dict(type='MLLA', arch='base', drop_path_rate=0.5), decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384), test_cfg=dict(_delete_=True, mode='whole'))
# The names of all norms of the backbone in the authors' code contain "norm", those of the heads do not.
optim_wrapper = dict(
    optimizer=dict(weight_decay=0.01),
    paramwise_cfg=dict(custom_keys=dict(_delete_=True, norm=dict(decay_mult=0.))))
