# Train a small UPerNet with PPMA on generated shapes.
_base_ = '_base_/shapes.py'

classes = 6
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='SegDataPreProcessor', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375],
                           bgr_to_rgb=True, size_divisor=32, test_cfg=dict(size_divisor=32)),
    backbone=dict(type='PPMA', arch='test'),
    decode_head=dict(
        type='UPerHead', in_channels=[32, 48, 64, 96], in_index=[0, 1, 2, 3], pool_scales=(1, 2), channels=48,
        dropout_ratio=0.1, num_classes=classes, norm_cfg=dict(type='BN'), align_corners=False,
        # Seven of eight pixels are background, so this class has a lower weight.
        loss_decode=dict(type='CrossEntropyLoss', class_weight=[0.2] + [1.] * 5)),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
