_base_ = 'fpn_rmt-t_8xb2-80k_ade20k-512x512.py'

model = dict(backbone=dict(arch='small'))
