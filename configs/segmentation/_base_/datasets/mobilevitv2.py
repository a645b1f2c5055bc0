# Augmentation of the MobileViTv2 authors' segmenters, for all data sets. Pillow resizes the images, as in their code.
# Images smaller than the crop are padded with black, unlabeled pixels.
resize = dict(keep_ratio=True, interpolation='bicubic', backend='pillow')
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=[(1024, 256), (1024, 768)], **resize),           # short side of 256 to 768
    dict(type='RandomFlip', prob=0.5),
    dict(type='Pad', size=(512, 512), pad_val=dict(img=0, seg=255)),
    dict(type='RandomCrop', crop_size=(512, 512), cat_max_ratio=0.75),
    dict(type='RandomGaussianBlur', prob=0.5, max_sigma=1.0),
    dict(type='PhotoMetricDistortion', hue_delta=9),                                 # a twentieth of the hue circle
    dict(type='RandomChannelOrder', prob=0.5),
    dict(type='RandomRotate', prob=1.0, degree=10, pad_val=0, seg_pad_val=255),
    dict(type='PackSegInputs')]
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
