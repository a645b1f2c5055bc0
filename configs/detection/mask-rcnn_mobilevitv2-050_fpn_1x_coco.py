_base_ = 'mask-rcnn_mobilevitv2-100_fpn_1x_coco.py'

model = dict(backbone=dict(arch='050'), neck=dict(in_channels=[64, 128, 192, 256]))
