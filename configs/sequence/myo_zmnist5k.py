# The paper's network on 4,000 MNIST digits of 16 x 16, read in Morton order (zMNIST, small): minutes on two CPU cores.
# About 100,000 parameters. Snake order: --cfg-options model.order=snake; the control: model.mixer=scan.
_base_ = 'test-ppma_digits.py'

size = (3, 16, 16)
norm = dict(mean=(0.13, 0.13, 0.13), std=(0.31, 0.31, 0.31), interpolation='bilinear')

model = dict(_delete_=True, type='TimmClassifier', name='myo_sequence', num_classes=10, dim=80, depth=4, num_heads=4,
             order='morton', drop_rate=0.1, label_smoothing=0.1)
train_dataloader = dict(dataset=dict(type='MNIST5k', transform=dict(input_size=size, **norm)))
test_dataloader = dict(batch_size=125, dataset=dict(type='MNIST5k', transform=dict(input_size=size, **norm)))
optim_wrapper = dict(optimizer=dict(lr=4e-3, weight_decay=0.05))
train_cfg = dict(max_epochs=12)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=True, end=2, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=2, eta_min_ratio=0.01, convert_to_iter_based=True)]
