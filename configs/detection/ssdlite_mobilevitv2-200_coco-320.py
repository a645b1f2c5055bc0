_base_ = '_base_/ssdlite_mobilevitv2.py'

model = dict(backbone=dict(arch='200'), neck=dict(in_channels=[768, 1024]),
             bbox_head=dict(in_channels=[768, 1024, 256, 128, 128, 64]))
