_base_ = ['_base_/models/upernet_ppma.py', '_base_/datasets/ade20k.py',
         '_base_/schedules/adamw_160k.py', '_base_/runtime.py']

# Tested on whole images, as published.
model = dict(backbone=dict(type='VMamba', arch='tiny_s1l8'), decode_head=dict(in_channels=[96, 192, 384, 768]),
             auxiliary_head=dict(in_channels=384), test_cfg=dict(_delete_=True, mode='whole'))
# Norms between stages have weight decay, as those of the stem: their names in the authors' code do not contain "norm".
optim_wrapper = dict(optimizer=dict(weight_decay=0.01),
                     paramwise_cfg=dict(custom_keys={'downsample.norm': dict(decay_mult=1.)}))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, eta_min=0., by_epoch=False, begin=1500, end=160000)]
train_dataloader = dict(batch_size=4)
