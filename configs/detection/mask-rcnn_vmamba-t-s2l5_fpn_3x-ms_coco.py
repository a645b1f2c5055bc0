_base_ = 'mask-rcnn_vmamba-t-s1l8_fpn_3x-ms_coco.py'

model = dict(backbone=dict(arch='tiny_s2l5'))
