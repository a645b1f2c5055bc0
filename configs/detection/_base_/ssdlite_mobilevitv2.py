# The published recipe of MobileViTv2's SSDLite: AdamW, weight decay 0.05 on all parameters, a warm-up over 500
# iterations from 9e-5, a cosine from 9e-4 to 1e-6, gradients clipped to norm 10, averaged weights, 200 epochs, 4 GPUs x
# 32 images. The authors train in mixed precision: add --amp to mmdet's `tools/train.py`. For another batch size,
# --auto-scale-lr scales the learning rate, whose base is 128 images.
# The authors start from their ImageNet classifier. Here the backbone starts from random weights. To start from a
# classifier's weights, add
#   --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=FILE
#
# Differences from the authors' training:
# - mmdet's random crop requires the overlap for every box in it; theirs requires it for one box.
# - mmdet's photometric distortion adds to the brightness and comes after resizing; theirs multiplies.
# - Gradients are clipped, as the paper says; the authors' own configuration does not clip them.
_base_ = ['mmdet::_base_/datasets/coco_detection.py', 'mmdet::_base_/default_runtime.py']

custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)
epochs = 200
size = (320, 320)                                            # width, height; other sizes work, too
model = dict(
    type='SingleStageDetector',
    data_preprocessor=dict(type='DetDataPreprocessor', mean=[0., 0., 0.], std=[255., 255., 255.], bgr_to_rgb=True),
    backbone=dict(type='MobileViTv2', arch='100', out_indices=(3, 4)),
    neck=dict(type='SSDLiteExtraLayers', in_channels=[384, 512]),
    bbox_head=dict(type='SSDLiteJointHead', num_classes=80, in_channels=[384, 512, 256, 128, 128, 64]),
    train_cfg=dict(
        assigner=dict(type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.5, min_pos_iou=0., ignore_iof_thr=-1,
                      gt_max_assign_all=False),
        sampler=dict(type='PseudoSampler'),
        smoothl1_beta=1., allowed_border=-1, pos_weight=-1, neg_pos_ratio=3, debug=False),
    # nms_pre counts the boxes of each class over all levels.
    test_cfg=dict(score_thr=0.01, nms_pre=400, nms=dict(type='nms', iou_threshold=0.5), max_per_img=200))

# Pillow's bicubic interpolation averages over all pixels when it shrinks images, as the authors' does. OpenCV's does
# not.
resize = dict(type='Resize', scale=size, keep_ratio=False, interpolation='bicubic', backend='pillow')
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='MinIoURandomCrop', min_ious=(0.1, 0.3, 0.5, 0.7, 0.9), min_crop_size=0.3),
    resize,
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion', brightness_delta=32, contrast_range=(0.5, 1.5), saturation_range=(0.5, 1.5),
         hue_delta=18),
    dict(type='PackDetInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    resize,
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))]
train_dataloader = dict(batch_size=32, num_workers=8, batch_sampler=None, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=32, num_workers=8, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(type='OptimWrapper', clip_grad=dict(max_norm=10.),
                     optimizer=dict(type='AdamW', lr=9e-4, betas=(0.9, 0.999), weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=500),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, end=epochs, T_max=epochs, eta_min=1e-6)]
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=epochs, val_interval=5)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(enable=False, base_batch_size=128)
# The average includes BatchNorm's statistics, as in the authors' files. On several GPUs, BatchNorm is synchronized.
custom_hooks = [dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=5e-4, update_buffers=True)]
sync_bn = 'torch'
default_hooks = dict(checkpoint=dict(interval=5, max_keep_ckpts=2, save_best='coco/bbox_mAP'))
env_cfg = dict(cudnn_benchmark=True)
