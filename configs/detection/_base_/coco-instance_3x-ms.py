# COCO instance segmentation for 36 epochs at multiple scales: the short side varies from 480 to 800. Half of the images
# are cropped first, as for DETR.
_base_ = ['mmdet::_base_/datasets/coco_instance.py', 'adamw_1x.py']

epochs = 36
resize = dict(type='RandomChoiceResize', scales=[(short, 1333) for short in range(480, 801, 32)], keep_ratio=True)
crop = [dict(type='RandomChoiceResize', scales=[(400, 1333), (500, 1333), (600, 1333)], keep_ratio=True),
         dict(type='RandomCrop', crop_type='absolute_range', crop_size=(384, 600), allow_negative_crop=True)]
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandomChoice', transforms=[[resize], [*crop, resize]]),
    dict(type='PackDetInputs')]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
train_cfg = dict(max_epochs=epochs)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type='MultiStepLR', begin=0, end=epochs, by_epoch=True, milestones=[27, 33], gamma=0.1)]
del crop, resize                       # helpers, which the config need not contain
