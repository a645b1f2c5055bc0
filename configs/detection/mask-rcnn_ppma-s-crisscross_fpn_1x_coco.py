_base_ = 'mask-rcnn_ppma-s_fpn_1x_coco.py'

model = dict(backbone=dict(arch='small_crisscross'))
