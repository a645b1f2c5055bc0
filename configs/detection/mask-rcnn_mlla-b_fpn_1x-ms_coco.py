_base_ = 'mask-rcnn_mlla-t_fpn_1x-ms_coco.py'

model = dict(backbone=dict(arch='base'), neck=dict(in_channels=[96, 192, 384, 768]))
