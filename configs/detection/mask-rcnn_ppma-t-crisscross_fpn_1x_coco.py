_base_ = 'mask-rcnn_ppma-t_fpn_1x_coco.py'

model = dict(backbone=dict(arch='tiny_crisscross'))
