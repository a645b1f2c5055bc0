# ADE20K for UPerNet: crops of 512 x 512, 2 images on each of 8 GPUs.
data_root = 'data/ade/ADEChallengeData2016'
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=(2048, 512), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(512, 512), cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(2048, 512), keep_ratio=True),
    dict(type='LoadAnnotations'),                                    # after Resize, so labels keep their size
    dict(type='PackSegInputs')]
# `--tta` averages over six sizes, relative to the single-scale test, each with its mirror image.
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='TestTimeAug', transforms=[
        [dict(type='Resize', scale=(int(2048 * ratio), int(512 * ratio)), keep_ratio=True)
         for ratio in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)],
        [dict(type='RandomFlip', prob=0.), dict(type='RandomFlip', prob=1.)],
        [dict(type='LoadAnnotations')],
        [dict(type='PackSegInputs')]])]
train_dataloader = dict(
    batch_size=2, num_workers=4, persistent_workers=True, sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='ADE20KDataset', data_root=data_root, pipeline=train_pipeline,
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training')))
val_dataloader = dict(
    batch_size=1, num_workers=4, persistent_workers=True, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='ADE20KDataset', data_root=data_root, pipeline=test_pipeline,
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation')))
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
auto_scale_lr = dict(enable=False, base_batch_size=16)
