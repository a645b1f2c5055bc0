_base_ = 'mask-rcnn_rmt-t_fpn_1x_coco.py'

model = dict(backbone=dict(arch='small'))
