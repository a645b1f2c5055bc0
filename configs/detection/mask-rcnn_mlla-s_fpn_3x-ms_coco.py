_base_ = 'mask-rcnn_mlla-t_fpn_3x-ms_coco.py'

model = dict(backbone=dict(arch='small'))
