_base_ = '_base_/ssdlite_mobilevitv2.py'

model = dict(backbone=dict(arch='075'), neck=dict(in_channels=[288, 384]),
             bbox_head=dict(in_channels=[288, 384, 256, 128, 128, 64]))
