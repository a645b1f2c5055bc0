_base_ = 'pspnet_mobilevitv2-100_4xb4-120e_ade20k-512x512.py'

model = dict(backbone=dict(arch='050'), decode_head=dict(in_channels=256),
             auxiliary_head=dict(in_channels=192))
