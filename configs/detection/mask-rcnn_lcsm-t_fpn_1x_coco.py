# PPMA's config with LCSM as the backbone.
_base_ = 'mask-rcnn_ppma-t_fpn_1x_coco.py'

model = dict(backbone=dict(type='LCSM'))
