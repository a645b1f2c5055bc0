# The recipe with which MobileViTv2's authors train on ImageNet-21k-P (winter 2021, 10,450 classes), from weights of
# ImageNet-1k: 80 epochs with 32 GPUs x 128 images of 256 x 256, without a warm-up. The data are in the usual folders,
# data/imagenet21k_p/{train,val}/CLASS/*, or below --data FOLDER. See mobilevitv2_300e.py for what differs.
_base_ = 'mobilevitv2_300e.py'

epochs = 80
data_root = 'data/imagenet21k_p'

model = dict(num_classes=10450)
train_dataloader = dict(dataset=dict(root=f'{data_root}/train'))
val_dataloader = dict(dataset=dict(root=f'{data_root}/val'))
test_dataloader = dict(dataset=dict(root=f'{data_root}/val'))
optim_wrapper = dict(optimizer=dict(lr=3e-4))
auto_scale_lr = dict(base_batch_size=4096)
param_scheduler = [dict(type='EpochCosineLR', eta_min_ratio=1e-6 / 3e-4)]
train_cfg = dict(max_epochs=epochs)
