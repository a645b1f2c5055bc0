_base_ = 'upernet_rmt-s_8xb2-160k_ade20k-512x512.py'

model = dict(backbone=dict(arch='base'), decode_head=dict(in_channels=[80, 160, 320, 512]),
             auxiliary_head=dict(in_channels=320))
