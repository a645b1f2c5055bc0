# A small MobileViTv2 at stride 8 and a narrow DeepLabv3 on generated shapes.
_base_ = '_base_/shapes.py'

# Images as in MobileViTv2's classification: RGB from 0 to 1.
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='SegDataPreProcessor', mean=[0., 0., 0.], std=[255., 255., 255.], bgr_to_rgb=True,
                           size_divisor=64, test_cfg=dict(size_divisor=64)),
    backbone=dict(type='MobileViTv2', arch='test', out_indices=(4,), output_stride=8),
    # The map has 16 cells a side, a quarter of the published one's: so are the dilations, nearly.
    decode_head=dict(
        type='DeepLabv3Head', in_channels=128, in_index=0, channels=64, dilations=(2, 4, 6), dropout_ratio=0.1,
        num_classes=6, loss_decode=dict(type='CrossEntropyLoss', class_weight=[0.2] + [1.] * 5)),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
