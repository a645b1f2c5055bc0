# PSPNet with MobileViTv2-1.0; otherwise equal to deeplabv3_mobilevitv2.py.
_base_ = 'deeplabv3_mobilevitv2.py'

model = dict(decode_head=dict(
    _delete_=True, type='PSPNetHead', in_channels=512, in_index=1, channels=512, pool_scales=(1, 2, 3, 6),
    num_classes=150, norm_cfg=_base_.norm_cfg, dropout_ratio=0.1, align_corners=True, loss_decode=_base_.loss))
