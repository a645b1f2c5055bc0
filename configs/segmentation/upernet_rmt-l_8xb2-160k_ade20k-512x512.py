_base_ = 'upernet_rmt-s_8xb2-160k_ade20k-512x512.py'

model = dict(backbone=dict(arch='large'), decode_head=dict(in_channels=[112, 224, 448, 640]),
             auxiliary_head=dict(in_channels=448))
