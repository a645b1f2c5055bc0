# The recipe with which MobileViTv2's authors fine-tune at 384 x 384: 10 epochs with 2 GPUs x 64 images, light
# augmentation and a constant learning rate. Give the classifier that was trained at 256 x 256 with --weights.
# The authors also set channels_last, which changes the speed only: --cfg-options model.channels_last=True.
_base_ = ['runtime.py', 'in1k.py']

epochs = 10
size = (3, 384, 384)
_transform = dict(input_size=size, mean=(0., 0., 0.), std=(1., 1., 1.), interpolation='bicubic')

model = dict(label_smoothing=0.1)
train_dataloader = dict(batch_size=64, dataset=dict(transform=dict(is_training=True, color_jitter=None, **_transform)))
val_dataloader = dict(batch_size=64, dataset=dict(transform=dict(crop_pct=1.0, **_transform)))
test_dataloader = dict(batch_size=64, dataset=dict(transform=dict(crop_pct=1.0, **_transform)))
del _transform
optim_wrapper = dict(constructor='TimmOptimizerConstructor', clip_grad=dict(max_norm=10.),
                     optimizer=dict(opt='momentum', lr=1e-3, momentum=0.9, weight_decay=4e-5))
auto_scale_lr = dict(enable=True, base_batch_size=128)
param_scheduler = None
train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
custom_hooks = [dict(type='EvaluateAtStartHook'), dict(type='ModelEMAHook', decay=1 - 0.00005)]
