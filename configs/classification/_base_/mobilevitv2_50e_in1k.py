# The recipe with which MobileViTv2's authors fine-tune weights of ImageNet-21k-P on ImageNet-1k: 50 epochs with 2 GPUs
# x 128 images of 256 x 256, the augmentation of mobilevitv2_300e.py, no warm-up. Give the classifier of ImageNet-21k-P
# with --weights. The paper clips gradients at 10, the authors' config does not; this config follows the paper.
_base_ = 'mobilevitv2_300e.py'

epochs = 50

optim_wrapper = dict(optimizer=dict(opt='momentum', lr=1e-2, momentum=0.9, weight_decay=4e-5))
auto_scale_lr = dict(base_batch_size=256)
param_scheduler = [dict(type='EpochCosineLR', eta_min_ratio=0.1)]
train_cfg = dict(max_epochs=epochs)
