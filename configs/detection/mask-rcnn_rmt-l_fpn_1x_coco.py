_base_ = 'mask-rcnn_rmt-t_fpn_1x_coco.py'

model = dict(backbone=dict(arch='large'), neck=dict(in_channels=[112, 224, 448, 640]))
