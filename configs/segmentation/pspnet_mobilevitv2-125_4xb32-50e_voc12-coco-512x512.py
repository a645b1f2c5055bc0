_base_ = 'pspnet_mobilevitv2-100_4xb32-50e_voc12-coco-512x512.py'

model = dict(backbone=dict(arch='125'), decode_head=dict(in_channels=640),
             auxiliary_head=dict(in_channels=480))
