# Compare mixers in Mask R-CNN on generated shapes (task detection of lab.compare generates the images).
_base_ = '../../configs/detection/mask-rcnn_test-ppma_shapes.py'

epochs = 9
model = dict(backbone=dict(mixers='attention'))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=60),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, end=epochs, T_max=epochs, eta_min_ratio=0.01,
         convert_to_iter_based=True)]
train_cfg = dict(max_epochs=epochs, val_interval=epochs)
