_base_ = 'fpn_rmt-t_8xb2-80k_ade20k-512x512.py'

model = dict(backbone=dict(arch='base'), neck=dict(in_channels=[80, 160, 320, 512]))
