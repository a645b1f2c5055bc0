# MobileViTv2's recipe for VOC with COCO: AdamW, 50 epochs, a warm-up over 500 iterations from 5e-5 to 5e-4, then a
# cosine per epoch to 1e-6.
_base_ = 'sgd_120e.py'

epochs = 50
optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=5e-4, betas=(0.9, 0.999), weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=500),
    dict(type='CosineAnnealingLR', by_epoch=True, T_max=epochs, eta_min=1e-6)]
train_cfg = dict(max_epochs=epochs, val_interval=5)
default_hooks = dict(checkpoint=dict(interval=5))
