_base_ = '_base_/ssdlite_mobilevitv2.py'

model = dict(backbone=dict(arch='125'), neck=dict(in_channels=[480, 640]),
             bbox_head=dict(in_channels=[480, 640, 256, 128, 128, 64]))
