_base_ = 'mask-rcnn_ppma-b_fpn_1x_coco.py'

model = dict(backbone=dict(arch='base_crisscross'))
