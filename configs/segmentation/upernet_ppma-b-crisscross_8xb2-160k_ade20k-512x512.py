_base_ = 'upernet_ppma-t-crisscross_8xb2-160k_ade20k-512x512.py'

model = dict(backbone=dict(arch='base_crisscross'), decode_head=dict(in_channels=[80, 160, 320, 512]),
             auxiliary_head=dict(in_channels=320))
