# The recipe with which PPMA's authors train on ImageNet-1k: 300 epochs with 8 GPUs x 128 images. Two points differ:
# - --amp trains in bfloat16 where the GPU supports it; the authors train in float16 with a loss scale.
# - RandAugment posterizes to 1 bit where the authors' timm asks for 0 bits, which Pillow 13 does not accept.
_base_ = ['runtime.py', 'in1k.py']

epochs = 300
size = (3, 224, 224)
# timm uses color_jitter, which the authors set to 0.4, only without RandAugment.
_train = dict(input_size=size, is_training=True, auto_augment='rand-m9-mstd0.5-inc1', color_jitter=0.4,
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
                     optimizer=dict(opt='adamw', lr=5e-4, weight_decay=0.05, decay_layer_scale=True))
auto_scale_lr = dict(enable=True, base_batch_size=512)              # 1e-3 for 8 x 128 images
param_scheduler = [dict(type='EpochCosineLR', warmup=5, warmup_lr=1e-6, eta_min=1e-5, delay=1)]
sync_bn = 'torch'                                                   # of several GPUs
train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
custom_hooks = [dict(type='ModelEMAHook', decay=0.99996, base_batch_size=512)]
