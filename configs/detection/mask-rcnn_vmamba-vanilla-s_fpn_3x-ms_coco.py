_base_ = 'mask-rcnn_vmamba-vanilla-t_fpn_3x-ms_coco.py'

model = dict(backbone=dict(arch='vanilla_small'))
