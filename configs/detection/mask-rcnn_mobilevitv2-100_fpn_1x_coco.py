_base_ = ['mmdet::_base_/models/mask-rcnn_r50_fpn.py', 'mmdet::_base_/datasets/coco_instance.py', '_base_/adamw_1x.py']

# Images as in MobileViTv2's classification: RGB from 0 to 1. It rounds maps with an odd side up: sides divisible by 64
# have none.
model = dict(
    data_preprocessor=dict(mean=[0., 0., 0.], std=[255., 255., 255.], pad_size_divisor=64),
    backbone=dict(_delete_=True, type='MobileViTv2', arch='100', out_indices=(1, 2, 3, 4)),
    neck=dict(in_channels=[128, 256, 384, 512]))
# None of the names of its BatchNorm layers has "norm" in it.
optim_wrapper = dict(paramwise_cfg=dict(_delete_=True, norm_decay_mult=0.))
