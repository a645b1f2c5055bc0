# Shared by all sequence configs: the network of the Myosotis paper (a tree with 4 children per node and one pixel per
# leaf), AdamW and a cosine schedule. Widths, depths, learning rates and weight decays follow the S5 paper, because the
# Myosotis paper gives none. To train the control, S5's recurrence instead of the tree, add
#   --cfg-options model.mixer=scan
_base_ = '../../classification/_base_/runtime.py'

batch_size = 50
warmup = 1
epochs = 100

model = dict(type='TimmClassifier', name='myo_sequence', num_classes=10, dim=128, depth=4, num_heads=8, arity=4,
             drop_rate=0.1)
_loader = dict(batch_size=batch_size, num_workers=0)
train_dataloader = dict(**_loader, drop_last=True, sampler=dict(type='DefaultSampler', shuffle=True),
                        dataset=dict(split='train'))
val_dataloader = dict(**_loader, sampler=dict(type='DefaultSampler', shuffle=False), dataset=dict(split='val'))
test_dataloader = dict(**_loader, sampler=dict(type='DefaultSampler', shuffle=False), dataset=dict(split='test'))
del _loader
optim_wrapper = dict(constructor='TimmOptimizerConstructor', clip_grad=dict(max_norm=5.0),
                     optimizer=dict(opt='adamw', lr=4e-3, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=True, end=warmup, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=warmup, eta_min_ratio=0.01, convert_to_iter_based=True)]
train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
val_cfg = dict()
test_cfg = dict()
