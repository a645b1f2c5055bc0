# PPMA's config with LCSM as the backbone.
_base_ = 'mask-rcnn_test-ppma_shapes.py'

model = dict(backbone=dict(type='LCSM'))
