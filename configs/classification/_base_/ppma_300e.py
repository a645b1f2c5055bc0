# The recipe with which PPMA's authors train on ImageNet-1k: 300 epochs with 8 GPUs x 128 images. Four points differ:
# - mmax9 limits the magnitudes of RandAugment to 9. At 10, timm posterizes to 0 bits, which Pillow 13 does not accept.
# - The learning rate changes at each step instead of each epoch.
# - The cosine starts after the warm-up. That of timm starts with it, and is 0.07 % lower after the 5 epochs.
# - With another batch the first learning rate is scaled, too, so that it stays at 1/1000 of the largest.
_base_ = ['runtime.py', 'in1k.py']

epochs = 300
warmup = 5
size = (3, 224, 224)
# timm uses color_jitter, which the authors set to 0.4, only without RandAugment.
_train = dict(input_size=size, is_training=True, auto_augment='rand-m9-mstd0.5-mmax9-inc1', color_jitter=0.4,
              interpolation='bicubic', re_prob=0.25, re_mode='pixel')
_val = dict(input_size=size, interpolation='bicubic', crop_pct=0.875)

model = dict(label_smoothing=0.1,
             data_preprocessor=dict(type='MixupPreprocessor', mixup_alpha=0.8, cutmix_alpha=1.0))
train_dataloader = dict(sampler=dict(_delete_=True, type='RepeatedAugmentationSampler', num_repeats=3),
                        dataset=dict(transform=_train))
val_dataloader = dict(dataset=dict(transform=_val))
test_dataloader = dict(dataset=dict(transform=_val))
del _train, _val
optim_wrapper = dict(constructor='TimmOptimizerConstructor',
                     optimizer=dict(opt='adamw', lr=5e-4, weight_decay=0.05))
auto_scale_lr = dict(enable=True, base_batch_size=512)              # 1e-3 for 8 x 128 images
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=warmup, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=warmup, eta_min=1e-5, convert_to_iter_based=True)]
sync_bn = 'torch'                                                   # of several GPUs
train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
custom_hooks = [dict(type='ModelEMAHook', decay=0.99996, base_batch_size=512)]
