# The published recipe of MobileViTv2's SSDLite: AdamW, weight decay 0.05 on every parameter, cosine from 9e-4 to 1e-6
# after 500 iterations from 9e-5, gradients cut at norm 10, an average of the weights, 200 epochs, 4 GPUs x 32 images.
# The authors train in mixed precision: mmdet's `tools/train.py --amp`. Other batches: `--auto-scale-lr` scales the
# learning rate from the base of 128 images.
# They start from their ImageNet classifier; here the backbone starts from random weights unless told otherwise:
#   --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=FILE
#
# Departures: mmdet's crop asks an overlap of every box in it where the authors' asks it of one, mmdet's photometric
# distortion adds to the brightness where theirs multiplies and comes after resizing, and gradients are cut as the paper
# says (the authors' own configuration does not).
_base_ = ['mmdet::_base_/datasets/coco_detection.py', 'mmdet::_base_/default_runtime.py']

custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)
epochs = 200
size = (320, 320)                                            # width, height; any other works
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
    # nms_pre: of each class, over all levels.
    test_cfg=dict(score_thr=0.01, nms_pre=400, nms=dict(type='nms', iou_threshold=0.5), max_per_img=200))

# Pillow's bicubic looks at every pixel when it makes images smaller, as the authors' does; OpenCV's does not.
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
# BatchNorm's statistics are averaged too, as in the authors' files. On several GPUs they are of the whole batch.
custom_hooks = [dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=5e-4, update_buffers=True)]
sync_bn = 'torch'
default_hooks = dict(checkpoint=dict(interval=5, max_keep_ckpts=2, save_best='coco/bbox_mAP'))
env_cfg = dict(cudnn_benchmark=True)
