_base_ = 'retinanet_ppma-t_fpn_1x_coco.py'

model = dict(backbone=dict(type='RMT'))
# BatchNorm of the backbone is synchronized between GPUs, too, as published.
sync_bn = 'torch'
