# DeepLabv3 with MobileViTv2-1.0 at stride 8 for 150 classes, tested on whole images. Images are RGB from 0 to 1.
# The backbone starts from random weights. To start from a classifier's weights, add
#   --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=FILE
norm_cfg = dict(type='BN')
loss = dict(type='CrossEntropyLoss', avg_non_ignore=True)             # averages over labeled pixels
model = dict(
    type='SingleResizeEncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[0., 0., 0.], std=[255., 255., 255.], bgr_to_rgb=True, size=(512, 512),
        pad_val=0, seg_pad_val=255),
    backbone=dict(type='MobileViTv2', arch='100', output_stride=8, out_indices=(3, 4)),
    decode_head=dict(
        type='DeepLabv3Head', in_channels=512, in_index=1, channels=512, dilations=(12, 24, 36), num_classes=150,
        norm_cfg=norm_cfg, dropout_ratio=0.1, align_corners=True, loss_decode=loss),
    # channels: a quarter of in_channels, but at least 128.
    auxiliary_head=dict(
        type='FCNHead', in_channels=384, in_index=0, channels=128, num_convs=1, concat_input=False, num_classes=150,
        norm_cfg=norm_cfg, dropout_ratio=0.1, align_corners=True, loss_decode=dict(loss_weight=0.4, **loss)),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'))
