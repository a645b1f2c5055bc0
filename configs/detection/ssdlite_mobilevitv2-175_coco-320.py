_base_ = '_base_/ssdlite_mobilevitv2.py'

model = dict(backbone=dict(arch='175'), neck=dict(in_channels=[672, 896]),
             bbox_head=dict(in_channels=[672, 896, 256, 128, 128, 64]))
