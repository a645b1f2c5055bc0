_base_ = 'retinanet_rmt-t_fpn_1x_coco.py'

model = dict(backbone=dict(arch='large'), neck=dict(in_channels=[224, 448, 640]))
