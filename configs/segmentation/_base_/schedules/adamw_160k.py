# PPMA's published recipe for UPerNet: AdamW, 160,000 iterations, a learning rate of 6e-5 that falls linearly to 0 from
# the first iteration, multiplied by a warm-up over 1,500 iterations. Parameters with "norm" in their names have no
# weight decay. The BatchNorm of the stem and of the heads ("bn") has weight decay, because its names in the authors'
# code do not contain "norm".
iterations = 160000
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='AdamW', lr=6e-5, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(custom_keys={'norm': dict(decay_mult=0.), 'backbone.stem': dict(decay_mult=1.)}))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, eta_min=0., by_epoch=False, begin=0, end=iterations)]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=iterations, val_interval=16000)
log_processor = dict(by_epoch=False)
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=16000, max_keep_ckpts=3, save_best='mIoU'),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'))
