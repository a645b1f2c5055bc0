_base_ = 'upernet_mambavision-t_8xb2-160k_ade20k-512x512.py'

model = dict(
    backbone=dict(arch='base'), decode_head=dict(in_channels=[128, 256, 512, 1024]),
    auxiliary_head=dict(in_channels=512))
