_base_ = 'upernet_vmamba-vanilla-t_4xb4-160k_ade20k-512x512.py'

model = dict(backbone=dict(arch='vanilla_small'))
