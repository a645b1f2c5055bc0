# The recipe with which MobileViTv2's authors train on ImageNet-1k: 300 epochs with 8 GPUs x 128 images of 256 x 256.
# Each width sets its learning rate and weight decay. The smallest learning rate is a tenth of the largest.
# The authors also set channels_last, which changes the speed only: --cfg-options model.channels_last=True.
# Three points differ:
# - --amp trains in bfloat16 where the GPU supports it; the authors train in float16 with a loss scale.
# - The last batch of an epoch is dropped; the authors fill it with images of the same epoch.
# - With another batch the learning rate is scaled; the authors' stays.
_base_ = ['runtime.py', 'in1k.py']

epochs = 300
size = (3, 256, 256)
_norm = dict(mean=(0., 0., 0.), std=(1., 1., 1.), interpolation='bicubic')
_train = dict(input_size=size, is_training=True, auto_augment='torchvision', re_prob=0.25, **_norm)
_val = dict(input_size=size, crop_pct=256 / 288, **_norm)

model = dict(label_smoothing=0.1,
             data_preprocessor=dict(type='MixupPreprocessor', mixup_alpha=0.2, cutmix_alpha=1.0))
train_dataloader = dict(dataset=dict(transform=_train))
val_dataloader = dict(dataset=dict(transform=_val))
test_dataloader = dict(dataset=dict(transform=_val))
del _norm, _train, _val
optim_wrapper = dict(constructor='TimmOptimizerConstructor', clip_grad=dict(max_norm=10.),
                     optimizer=dict(opt='adamw'))
auto_scale_lr = dict(enable=True, base_batch_size=1024)
# The authors' warm-up has 20,000 steps, of 1,252 in each epoch.
param_scheduler = [dict(type='EpochCosineLR', warmup=20_000 / 1_252, warmup_lr=1e-6, eta_min_ratio=0.1,
                        convert_to_iter_based=True)]
train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
custom_hooks = [dict(type='ModelEMAHook', decay=1 - 0.0005)]
