_base_ = 'upernet_mambavision-t_8xb2-160k_ade20k-512x512.py'

# The windows differ from those of the other sizes, as published.
model = dict(
    backbone=dict(arch='small', window_size=(160, 56)),
    decode_head=dict(in_channels=[96, 192, 384, 768]), auxiliary_head=dict(in_channels=384))
