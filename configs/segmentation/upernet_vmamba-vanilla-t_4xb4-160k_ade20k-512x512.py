_base_ = 'upernet_vmamba-t-s1l8_4xb4-160k_ade20k-512x512.py'

model = dict(backbone=dict(arch='vanilla_tiny'))
# These norms between stages have no weight decay: their names in the authors' code contain "norm".
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'downsample.norm': dict(decay_mult=0.)}))
