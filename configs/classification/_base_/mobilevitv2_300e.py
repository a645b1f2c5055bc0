# The recipe with which MobileViTv2's authors train on ImageNet-1k: 300 epochs with 8 GPUs x 128 images of 256 x 256.
# Each width sets its learning rate, schedule and weight decay. The smallest learning rate is a tenth of the largest.
# The authors also set channels_last, which changes the speed only: --cfg-options model.channels_last=True.
_base_ = ['runtime.py', 'in1k.py']

epochs = 300
size = (3, 256, 256)
_norm = dict(mean=(0., 0., 0.), std=(1., 1., 1.), interpolation='bicubic')
# The authors use torchvision's RandAugment: 2 operations of magnitude 9 out of 30, which are 3 out of timm's 10.
_train = dict(input_size=size, is_training=True, auto_augment='rand-m3-n2-p1-inc1', re_prob=0.25, **_norm)
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
train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
custom_hooks = [dict(type='ModelEMAHook', decay=1 - 0.0005)]
