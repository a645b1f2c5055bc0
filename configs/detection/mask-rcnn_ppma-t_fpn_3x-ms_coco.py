_base_ = ['mmdet::_base_/models/mask-rcnn_r50_fpn.py', '_base_/coco-instance_3x-ms.py']

model = dict(backbone=dict(_delete_=True, type='PPMA', arch='tiny'), neck=dict(in_channels=[64, 128, 256, 512]))
