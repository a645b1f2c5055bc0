_base_ = 'upernet_vmamba-t-s1l8_4xb4-160k_ade20k-512x512.py'

model = dict(backbone=dict(arch='base_s2l15'), decode_head=dict(in_channels=[128, 256, 512, 1024]),
             auxiliary_head=dict(in_channels=512))
