# Train a small DeepLabv3 with MobileViTv2 at stride 8 on generated shapes.
_base_ = '_base_/shapes.py'

# Images are RGB from 0 to 1, as for MobileViTv2's classifiers.
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='SegDataPreProcessor', mean=[0., 0., 0.], std=[255., 255., 255.], bgr_to_rgb=True,
                           size_divisor=64, test_cfg=dict(size_divisor=64)),
    backbone=dict(type='MobileViTv2', arch='test', out_indices=(4,), output_stride=8),
    # The map has 16 cells per side, a quarter of the published network's, so the dilations are smaller, too.
    decode_head=dict(
        type='DeepLabv3Head', in_channels=128, in_index=0, channels=64, dilations=(2, 4, 6), dropout_ratio=0.1,
        num_classes=6, loss_decode=dict(type='CrossEntropyLoss', class_weight=[0.2] + [1.] * 5)),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
