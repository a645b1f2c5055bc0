_base_ = 'mask-rcnn_vmamba-t-s1l8_fpn_1x_coco.py'

model = dict(backbone=dict(arch='tiny_s2l5'))
