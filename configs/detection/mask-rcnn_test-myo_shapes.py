# PPMA's config but for the mixer.
_base_ = 'mask-rcnn_test-ppma_shapes.py'

model = dict(backbone=dict(type='Myo'))
