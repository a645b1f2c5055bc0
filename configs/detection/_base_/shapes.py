# Detection and instance segmentation on the images of `subquad make-dataset shapes`, in minutes on two CPU cores.
_base_ = ['mmdet::_base_/default_runtime.py']

custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)
data_root = 'data/shapes/'
epochs = 10
dataset = dict(type='CocoDataset', data_root=data_root,
               metainfo=dict(classes=('circle', 'ring', 'triangle', 'square', 'star')))
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale_factor=1.0),          # keeps the size; prediction needs scale_factor
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))]
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    # Shapes have no preferred orientation.
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackDetInputs')]
train_dataloader = dict(
    batch_size=8, num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(**dataset, ann_file='annotations/instances_train.json', data_prefix=dict(img='images/train/'),
                 filter_cfg=dict(filter_empty_gt=False), pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=8, num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**dataset, ann_file='annotations/instances_val.json', data_prefix=dict(img='images/val/'),
                 test_mode=True, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='CocoMetric', ann_file=data_root + 'annotations/instances_val.json', metric=['bbox', 'segm'])
test_evaluator = val_evaluator

optim_wrapper = dict(type='OptimWrapper', clip_grad=dict(max_norm=5.0),
                     optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
                     paramwise_cfg=dict(norm_decay_mult=0.))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, end=epochs, T_max=epochs, eta_min_ratio=0.01,
         convert_to_iter_based=True)]
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=epochs, val_interval=epochs)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
default_hooks = dict(checkpoint=dict(max_keep_ckpts=2))
randomness = dict(seed=0)
del dataset
