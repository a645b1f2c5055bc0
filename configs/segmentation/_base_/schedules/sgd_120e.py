# MobileViTv2's recipe for ADE20K: SGD, 120 epochs, a cosine per epoch from 0.02 to 0.0002, no weight decay on norms and
# biases. Averaged weights are tested and saved. The authors train in mixed precision: add --amp.
epochs = 120
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02, momentum=0.9, weight_decay=1e-4),
    paramwise_cfg=dict(norm_decay_mult=0., bias_decay_mult=0.), clip_grad=dict(max_norm=10.))
param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=True, T_max=epochs, eta_min=2e-4)]
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=epochs, val_interval=10)
# With a launcher, all BatchNorm layers become SyncBatchNorm, also in the backbone. On one GPU or a CPU nothing changes.
sync_bn = 'torch'
custom_hooks = [dict(type='EMAHook', momentum=0.0005, update_buffers=True)]
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', interval=10, max_keep_ckpts=3, save_best='mIoU'),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'))
