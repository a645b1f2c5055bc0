# MobileViTv2's on VOC with COCO: AdamW, 50 epochs, learning rate 5e-4 after 500 iterations of warm-up from 5e-5, then
# to 1e-6 by a cosine of the epoch.
_base_ = 'sgd_120e.py'

epochs = 50
optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=5e-4, betas=(0.9, 0.999), weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=500),
    dict(type='CosineAnnealingLR', by_epoch=True, T_max=epochs, eta_min=1e-6)]
train_cfg = dict(max_epochs=epochs, val_interval=5)
default_hooks = dict(checkpoint=dict(interval=5))
