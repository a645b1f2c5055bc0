# Recipe of the Pyramid Vision Transformer (arXiv 2102.12122) for Semantic FPN: AdamW, 80,000 iterations, a learning
# rate of 1e-4 that falls to 0 with a power of 0.9, weight decay 1e-4 on all parameters.
_base_ = 'adamw_160k.py'

iterations = 80000
optim_wrapper = dict(optimizer=dict(lr=1e-4, weight_decay=1e-4), paramwise_cfg=None)
param_scheduler = [dict(type='PolyLR', power=0.9, eta_min=0., by_epoch=False, begin=0, end=iterations)]
train_cfg = dict(max_iters=iterations, val_interval=8000)
default_hooks = dict(checkpoint=dict(interval=8000))
