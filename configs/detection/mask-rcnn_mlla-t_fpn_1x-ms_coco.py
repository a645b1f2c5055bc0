# The published recipe has the augmentation of 36 epochs for 12 epochs, too.
_base_ = 'mask-rcnn_mlla-t_fpn_3x-ms_coco.py'

model = dict(backbone=dict(drop_path_rate=0.1))
train_cfg = dict(max_epochs=12)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type='MultiStepLR', begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1)]
