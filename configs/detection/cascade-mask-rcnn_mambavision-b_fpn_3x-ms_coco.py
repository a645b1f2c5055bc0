_base_ = 'cascade-mask-rcnn_mambavision-t_fpn_3x-ms_coco.py'

model = dict(backbone=dict(arch='base'), neck=dict(in_channels=[128, 256, 512, 1024]))
