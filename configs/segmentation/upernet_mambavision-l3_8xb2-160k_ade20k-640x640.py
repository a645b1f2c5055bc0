_base_ = 'upernet_mambavision-t_8xb2-160k_ade20k-512x512.py'

size = (640, 640)
model = dict(
    data_preprocessor=dict(size=size), backbone=dict(arch='large3_512'),
    decode_head=dict(in_channels=[256, 512, 1024, 2048]), auxiliary_head=dict(in_channels=1024))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=(2560, 640), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(2560, 640), keep_ratio=True),
    dict(type='LoadAnnotations'),                                    # after Resize, so labels keep their size
    dict(type='PackSegInputs')]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
