_base_ = 'mask-rcnn_mobilevitv2-100_fpn_1x_coco.py'

model = dict(backbone=dict(arch='150'), neck=dict(in_channels=[192, 384, 576, 768]))
