_base_ = '_base_/ssdlite_mobilevitv2.py'

model = dict(backbone=dict(arch='050'), neck=dict(in_channels=[192, 256]),
             bbox_head=dict(in_channels=[192, 256, 256, 128, 128, 64]))
