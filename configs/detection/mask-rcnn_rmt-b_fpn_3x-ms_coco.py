_base_ = 'mask-rcnn_rmt-s_fpn_3x-ms_coco.py'

model = dict(backbone=dict(arch='base'), neck=dict(in_channels=[80, 160, 320, 512]))
