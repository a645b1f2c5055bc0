_base_ = 'cascade-mask-rcnn_mambavision-t_fpn_3x-ms_coco.py'

model = dict(backbone=dict(arch='small'), neck=dict(in_channels=[96, 192, 384, 768]))
