# Semantic segmentation of the data set of `subquad make-dataset shapes`, in minutes on two CPU cores.
_base_ = 'runtime.py'

data_root = 'data/shapes/'
epochs = 28
# Label 0, the background, is a class like the others.
_metainfo = dict(classes=('background', 'circle', 'ring', 'triangle', 'square', 'star'),
                 palette=[[0, 0, 0], [228, 26, 28], [77, 175, 74], [55, 126, 184], [255, 217, 47], [231, 41, 138]])
_dataset = dict(type='BaseSegDataset', data_root=data_root, metainfo=_metainfo)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    # Shapes look as likely from every side.
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackSegInputs')]
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
train_dataloader = dict(
    batch_size=8, num_workers=0, drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(**_dataset, data_prefix=dict(img_path='images/train', seg_map_path='annotations_seg/train'),
                 pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=8, num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**_dataset, data_prefix=dict(img_path='images/val', seg_map_path='annotations_seg/val'),
                 test_mode=True, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator

optim_wrapper = dict(type='OptimWrapper', clip_grad=dict(max_norm=5.0),
                     optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
                     paramwise_cfg=dict(norm_decay_mult=0.))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, end=epochs, T_max=epochs, eta_min_ratio=0.01,
         convert_to_iter_based=True)]
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=epochs, val_interval=epochs)
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=1),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'))
log_processor = dict(by_epoch=True)
randomness = dict(seed=0)
