_base_ = 'mask-rcnn_mobilevitv2-100_fpn_1x_coco.py'

model = dict(backbone=dict(arch='200'), neck=dict(in_channels=[256, 512, 768, 1024]))
