_base_ = 'mask-rcnn_vmamba-vanilla-t_fpn_1x_coco.py'

model = dict(backbone=dict(arch='vanilla_small'))
