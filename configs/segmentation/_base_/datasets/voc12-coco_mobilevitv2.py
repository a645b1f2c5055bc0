# PASCAL VOC 2012, its augmentation (SBD) and COCO for DeepLabv3 and PSPNet: 32 images on each of 4 GPUs. README.md
# lists the folders and shows how to convert COCO's annotations to VOC's classes.
_base_ = 'mobilevitv2.py'

# As in the authors' evaluation, images have a short side of 512 and are then resized down to multiples of the stride.
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeShortSide', size=512, interpolation='bicubic', backend='pillow'),
    dict(type='ResizeToStride', stride=16),
    dict(type='LoadAnnotations'),                                    # after resizing, so labels keep their size
    dict(type='PackSegInputs')]
voc = dict(type='PascalVOCDataset', data_root='data/VOCdevkit/VOC2012')
coco = dict(type='PascalVOCDataset', data_root='data/coco')
train_dataloader = dict(
    batch_size=32, num_workers=8, persistent_workers=True, drop_last=True,       # drop_last: see ade20k_mobilevitv2.py
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='ConcatDataset', datasets=[
        dict(ann_file='ImageSets/Segmentation/train.txt', pipeline=_base_.train_pipeline,
             data_prefix=dict(img_path='JPEGImages', seg_map_path='SegmentationClass'), **voc),
        dict(ann_file='ImageSets/Segmentation/aug.txt', pipeline=_base_.train_pipeline,
             data_prefix=dict(img_path='JPEGImages', seg_map_path='SegmentationClassAug'), **voc),
        dict(ann_file='voc21/train2017.txt', pipeline=_base_.train_pipeline,
             data_prefix=dict(img_path='train2017', seg_map_path='voc21/train2017'), **coco)]))
val_dataloader = dict(
    batch_size=1, num_workers=4, persistent_workers=True, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        ann_file='ImageSets/Segmentation/val.txt', pipeline=test_pipeline,
        data_prefix=dict(img_path='JPEGImages', seg_map_path='SegmentationClass'), **voc))
test_dataloader = val_dataloader
auto_scale_lr = dict(enable=False, base_batch_size=128)
