_base_ = '_base_/ssdlite_mobilevitv2.py'

model = dict(backbone=dict(arch='150'), neck=dict(in_channels=[576, 768]),
             bbox_head=dict(in_channels=[576, 768, 256, 128, 128, 64]))
