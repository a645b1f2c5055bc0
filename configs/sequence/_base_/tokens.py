# Shared by the configs of LCSMSequence: a causal model with labels for tokens, AdamW and a cosine schedule.
_base_ = '../../classification/_base_/runtime.py'

model = dict(type='TimmClassifier', name='lcsm_sequence', vocab_size=256, dim=64, depth=2, num_heads=2)
_loader = dict(batch_size=64, num_workers=0)
train_dataloader = dict(**_loader, drop_last=True, sampler=dict(type='DefaultSampler', shuffle=True),
                        dataset=dict(split='train'))
val_dataloader = dict(**_loader, sampler=dict(type='DefaultSampler', shuffle=False), dataset=dict(split='val'))
test_dataloader = dict(**_loader, sampler=dict(type='DefaultSampler', shuffle=False), dataset=dict(split='test'))
del _loader
optim_wrapper = dict(constructor='TimmOptimizerConstructor', clip_grad=dict(max_norm=1.0),
                     optimizer=dict(opt='adamw', lr=5e-3, weight_decay=0.1))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=1, eta_min_ratio=0.01, convert_to_iter_based=True)]
train_cfg = dict(by_epoch=True, max_epochs=10, val_interval=1)
val_cfg = dict()
test_cfg = dict()
