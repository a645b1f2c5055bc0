_base_ = 'upernet_vmamba-t-s1l8_4xb4-160k_ade20k-512x512.py'

model = dict(backbone=dict(arch='small_s2l15'))
