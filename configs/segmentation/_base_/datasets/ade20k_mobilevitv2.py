# ADE20K for DeepLabv3 and PSPNet: 4 images on each of 4 GPUs.
_base_ = 'mobilevitv2.py'

# As in the authors' evaluation, images have a short side of 512 and are then resized down to multiples of the stride.
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeShortSide', size=512, interpolation='bicubic', backend='pillow'),
    dict(type='ResizeToStride', stride=8),
    dict(type='LoadAnnotations'),                                    # after resizing, so labels keep their size
    dict(type='PackSegInputs')]
data_root = 'data/ade/ADEChallengeData2016'
train_dataloader = dict(
    # drop_last: BatchNorm in the pooled branches does not accept a last batch of a single image.
    batch_size=4, num_workers=4, persistent_workers=True, drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='ADE20KDataset', data_root=data_root, pipeline=_base_.train_pipeline,
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training')))
val_dataloader = dict(
    batch_size=1, num_workers=4, persistent_workers=True, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='ADE20KDataset', data_root=data_root, pipeline=test_pipeline,
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation')))
test_dataloader = val_dataloader
auto_scale_lr = dict(enable=False, base_batch_size=16)
