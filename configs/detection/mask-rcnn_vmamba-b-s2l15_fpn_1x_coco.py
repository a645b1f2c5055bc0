_base_ = 'mask-rcnn_vmamba-t-s1l8_fpn_1x_coco.py'

model = dict(backbone=dict(arch='base_s2l15'), neck=dict(in_channels=[128, 256, 512, 1024]))
