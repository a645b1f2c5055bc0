_base_ = 'retinanet_rmt-t_fpn_1x_coco.py'

model = dict(backbone=dict(arch='small'))
