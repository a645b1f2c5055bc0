# Train PPMA-T from scratch on your own images:
#   subquad train ppma-tiny_folder --data FOLDER
# FOLDER contains train/CLASS/* and val/CLASS/*, from which the number of classes is read. Add --model NAME to train
# another model.
_base_ = '_base_/runtime.py'

epochs = 100
data_root = 'data'
size = (3, 224, 224)
train = dict(input_size=size, is_training=True, auto_augment='rand-m9-mstd0.5-inc1', interpolation='bicubic',
             re_prob=0.25)

model = dict(type='TimmClassifier', name='ppma_tiny', label_smoothing=0.1)
train_dataloader = dict(
    batch_size=64, num_workers=2, drop_last=False, worker_init_fn=dict(type='keep_torch_worker_seeds'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='ImageFolder', root=f'{data_root}/train', transform=train))
val_dataloader = dict(
    batch_size=64, num_workers=2, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='ImageFolder', root=f'{data_root}/val',
                 transform=dict(input_size=size, interpolation='bicubic', crop_pct=0.875)))
test_dataloader = val_dataloader
optim_wrapper = dict(constructor='TimmOptimizerConstructor', clip_grad=dict(max_norm=5.0),
                     optimizer=dict(opt='adamw', lr=5e-4, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=5, eta_min_ratio=0.02, convert_to_iter_based=True)]
train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
val_cfg = dict()
test_cfg = dict()
