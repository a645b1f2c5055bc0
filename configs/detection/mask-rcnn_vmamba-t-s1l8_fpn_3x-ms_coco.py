_base_ = 'mask-rcnn_ppma-t_fpn_3x-ms_coco.py'

model = dict(backbone=dict(type='VMamba', arch='tiny_s1l8'), neck=dict(in_channels=[96, 192, 384, 768]))
# Norms between stages have weight decay, as those of the stem: their names in the authors' code do not contain "norm".
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'downsample.norm': dict(decay_mult=1.)}))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=1000),
    dict(type='MultiStepLR', begin=0, end=36, by_epoch=True, milestones=[27, 33], gamma=0.1)]
