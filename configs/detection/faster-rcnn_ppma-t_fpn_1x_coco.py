_base_ = ['mmdet::_base_/models/faster-rcnn_r50_fpn.py', 'mmdet::_base_/datasets/coco_detection.py',
          '_base_/adamw_1x.py']

model = dict(backbone=dict(_delete_=True, type='PPMA', arch='tiny'), neck=dict(in_channels=[64, 128, 256, 512]))
