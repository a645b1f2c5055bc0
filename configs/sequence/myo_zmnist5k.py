# 4,000 MNIST digits of 16 x 16 pixels in Morton order: a small version of zMNIST. The model has about 110,000
# parameters and trains in minutes on two CPU cores. There is no validation during training, so the test part stays
# unseen until `subquad test`.
_base_ = '../classification/test-ppma_digits.py'

warmup = 2
size = (3, 16, 16)
norm = dict(mean=(0.13, 0.13, 0.13), std=(0.31, 0.31, 0.31), interpolation='bilinear')

model = dict(_delete_=True, type='TimmClassifier', name='myo_sequence', num_classes=10, dim=64, depth=4, num_heads=8,
             mlp_ratio=0.5, order='morton', label_smoothing=0.1)
train_dataloader = dict(dataset=dict(type='MNIST5k', transform=dict(
    input_size=size, scale=(0.85, 1.0), ratio=(0.9, 1.1), **norm)))
test_dataloader = dict(batch_size=125, dataset=dict(type='MNIST5k', transform=dict(input_size=size, **norm)))
optim_wrapper = dict(optimizer=dict(lr=5e-3, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=True, end=warmup, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=warmup, eta_min_ratio=0.01, convert_to_iter_based=True)]
train_cfg = dict(max_epochs=16)
