_base_ = 'mask-rcnn_rmt-t_fpn_1x_coco.py'

model = dict(backbone=dict(arch='base'), neck=dict(in_channels=[80, 160, 320, 512]))
