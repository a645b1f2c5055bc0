_base_ = 'mask-rcnn_vmamba-t-s1l8_fpn_1x_coco.py'

model = dict(backbone=dict(arch='small_s2l15', drop_path_rate=0.2))
