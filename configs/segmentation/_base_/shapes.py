# Semantic segmentation of the images of `subquad make-dataset shapes`, in minutes on two CPU cores.
_base_ = 'runtime.py'

data_root = 'data/shapes/'
epochs = 28
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    # Shapes have no preferred orientation.
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackSegInputs')]
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
# `--tta` averages over three sizes, each with its mirror image.
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='TestTimeAug', transforms=[
        [dict(type='Resize', scale_factor=factor, keep_ratio=True) for factor in (0.75, 1.0, 1.25)],
        [dict(type='RandomFlip', prob=0.), dict(type='RandomFlip', prob=1.)],
        [dict(type='LoadAnnotations')],
        [dict(type='PackSegInputs')]])]
train_dataloader = dict(
    batch_size=8, num_workers=0, drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='ShapesDataset', data_root=data_root, pipeline=train_pipeline,
                 data_prefix=dict(img_path='images/train', seg_map_path='annotations_seg/train')))
val_dataloader = dict(
    batch_size=8, num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='ShapesDataset', data_root=data_root, pipeline=test_pipeline, test_mode=True,
                 data_prefix=dict(img_path='images/val', seg_map_path='annotations_seg/val')))
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
    checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=2),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'))
log_processor = dict(by_epoch=True)
randomness = dict(seed=0)
