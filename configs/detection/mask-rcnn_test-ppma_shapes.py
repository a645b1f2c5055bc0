# Train a small Mask R-CNN with PPMA on generated shapes of 18 to 56 pixels.
_base_ = ['mmdet::_base_/models/mask-rcnn_r50_fpn.py', '_base_/shapes.py']

channels = 64
classes = 5
roi_extractor = dict(out_channels=channels, finest_scale=28)       # larger shapes than 56 pixels use stride 8
model = dict(
    backbone=dict(_delete_=True, type='PPMA', arch='test'),
    neck=dict(in_channels=[32, 48, 64, 96], out_channels=channels, num_outs=4),
    rpn_head=dict(in_channels=channels, feat_channels=channels,
                  anchor_generator=dict(scales=[4], ratios=[1.0], strides=[4, 8, 16, 32])),
    roi_head=dict(
        bbox_roi_extractor=roi_extractor,
        bbox_head=dict(in_channels=channels, fc_out_channels=128, num_classes=classes),
        mask_roi_extractor=roi_extractor,
        mask_head=dict(num_convs=2, in_channels=channels, conv_out_channels=channels, num_classes=classes)),
    train_cfg=dict(rpn=dict(sampler=dict(num=64)), rpn_proposal=dict(nms_pre=200, max_per_img=100),
                   rcnn=dict(sampler=dict(num=32))),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=100)))
del roi_extractor
