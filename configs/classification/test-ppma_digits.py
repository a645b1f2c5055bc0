# Train a small PPMA on scikit-learn's 1,797 handwritten digits, in minutes on two CPU cores. There is no validation
# during training, so the test part stays unseen until `subquad test`.
_base_ = '_base_/runtime.py'

epochs = 20
size = (3, 32, 32)
norm = dict(mean=(0.3, 0.3, 0.3), std=(0.4, 0.4, 0.4), interpolation='bilinear')

model = dict(type='TimmClassifier', name='test_ppma', num_classes=10, drop_path_rate=0.05, label_smoothing=0.1)
train_dataloader = dict(
    batch_size=64, num_workers=0, drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='Digits', split='train', transform=dict(
        input_size=size, is_training=True, scale=(0.7, 1.0), ratio=(0.8, 1.25), hflip=0., color_jitter=None, **norm)))
test_dataloader = dict(
    batch_size=120, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='Digits', split='test', transform=dict(input_size=size, crop_pct=1.0, **norm)))
optim_wrapper = dict(constructor='TimmOptimizerConstructor', clip_grad=dict(max_norm=5.0),
                     optimizer=dict(opt='adamw', lr=2e-3, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=5, eta_min_ratio=0.005, convert_to_iter_based=True)]
train_cfg = dict(by_epoch=True, max_epochs=epochs)
test_cfg = dict()
