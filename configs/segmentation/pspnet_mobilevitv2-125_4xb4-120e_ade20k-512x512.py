_base_ = 'pspnet_mobilevitv2-100_4xb4-120e_ade20k-512x512.py'

model = dict(backbone=dict(arch='125'), decode_head=dict(in_channels=640),
             auxiliary_head=dict(in_channels=480))
