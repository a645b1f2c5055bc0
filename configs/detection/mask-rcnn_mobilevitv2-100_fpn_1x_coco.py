_base_ = ['mmdet::_base_/models/mask-rcnn_r50_fpn.py', 'mmdet::_base_/datasets/coco_instance.py', '_base_/adamw_1x.py']

# Images are RGB from 0 to 1, as for MobileViTv2's classifiers. MobileViTv2 rounds odd map sizes up; images with sides
# divisible by 64 have no such maps.
model = dict(
    data_preprocessor=dict(mean=[0., 0., 0.], std=[255., 255., 255.], pad_size_divisor=64),
    backbone=dict(_delete_=True, type='MobileViTv2', arch='100', out_indices=(1, 2, 3, 4)),
    neck=dict(in_channels=[128, 256, 384, 512]))
# The names of MobileViTv2's BatchNorm layers do not contain "norm", so weight decay is switched off by type.
optim_wrapper = dict(paramwise_cfg=dict(_delete_=True, norm_decay_mult=0.))
