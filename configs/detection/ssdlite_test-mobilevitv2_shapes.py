# Train a small SSDLite with MobileViTv2 on generated shapes of 18 to 56 pixels. Levels start at stride 8, anchors at 18
# pixels.
_base_ = '_base_/shapes.py'

channels = (64, 96, 128, 64, 64)
ratios = ((2,),) * 5
# Images are RGB from 0 to 1, as for MobileViTv2's classifiers.
model = dict(
    type='SingleStageDetector',
    data_preprocessor=dict(type='DetDataPreprocessor', mean=[0., 0., 0.], std=[255., 255., 255.], bgr_to_rgb=True,
                           pad_size_divisor=64),
    backbone=dict(type='MobileViTv2', arch='test', out_indices=(2, 3, 4)),
    neck=dict(type='SSDLiteExtraLayers', in_channels=channels[:3], out_channels=channels[3:]),
    bbox_head=dict(
        type='SSDLiteJointHead', num_classes=5, in_channels=channels, feat_channels=channels,
        anchor_generator=dict(type='SSDLiteAnchorGenerator', ratios=ratios, scale_range=(0.14, 0.64))),
    train_cfg=dict(
        assigner=dict(type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.5, min_pos_iou=0., ignore_iof_thr=-1,
                      gt_max_assign_all=False),
        sampler=dict(type='PseudoSampler'), smoothl1_beta=1., allowed_border=-1, pos_weight=-1, neg_pos_ratio=3,
        debug=False),
    test_cfg=dict(nms_pre=200, nms=dict(type='nms', iou_threshold=0.5), score_thr=0.02, max_per_img=100))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackDetInputs')]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_evaluator = dict(metric='bbox')
test_evaluator = val_evaluator
