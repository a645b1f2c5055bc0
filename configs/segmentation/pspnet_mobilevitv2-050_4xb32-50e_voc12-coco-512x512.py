_base_ = 'pspnet_mobilevitv2-100_4xb32-50e_voc12-coco-512x512.py'

model = dict(backbone=dict(arch='050'), decode_head=dict(in_channels=256),
             auxiliary_head=dict(in_channels=192))
