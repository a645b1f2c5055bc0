_base_ = 'mask-rcnn_vmamba-t-s1l8_fpn_1x_coco.py'

model = dict(backbone=dict(arch='vanilla_tiny'))
# These norms between stages have no weight decay: their names in the authors' code contain "norm".
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'downsample.norm': dict(decay_mult=0.)}))
