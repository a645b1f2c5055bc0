_base_ = 'mask-rcnn_vmamba-vanilla-t_fpn_1x_coco.py'

model = dict(backbone=dict(arch='vanilla_base'), neck=dict(in_channels=[128, 256, 512, 1024]))
