_base_ = ['mmdet::_base_/models/retinanet_r50_fpn.py', 'mmdet::_base_/datasets/coco_detection.py', '_base_/adamw_1x.py']

# RetinaNet starts at stride 8. An output norm at stride 4 would get no gradient, which distributed training does not
# accept.
model = dict(backbone=dict(_delete_=True, type='PPMA', arch='tiny', out_indices=(1, 2, 3)),
             neck=dict(in_channels=[128, 256, 512], start_level=0))
