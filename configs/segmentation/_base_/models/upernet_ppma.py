# UPerNet with PPMA-T for 150 classes, tested with sliding windows of 512 x 512.
# The backbone starts from random weights. To start from a classifier's weights, add
#   --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=FILE
# BatchNorm is synchronized between GPUs in the heads only, as published.
norm_cfg = dict(type='SyncBN')
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True,
        size=(512, 512), pad_val=0, seg_pad_val=255),
    backbone=dict(type='PPMA', arch='tiny'),
    decode_head=dict(
        type='UPerHead', in_channels=[64, 128, 256, 512], in_index=[0, 1, 2, 3], pool_scales=(1, 2, 3, 6),
        channels=512, num_classes=150, norm_cfg=norm_cfg, dropout_ratio=0.1, align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss')),
    auxiliary_head=dict(
        type='FCNHead', in_channels=256, in_index=2, channels=256, num_convs=1, concat_input=False, num_classes=150,
        norm_cfg=norm_cfg, dropout_ratio=0.1, align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=0.4)),
    train_cfg=dict(),
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)))
