_base_ = 'mask-rcnn_ppma-b_fpn_3x-ms_coco.py'

model = dict(backbone=dict(type='LCSM'))
