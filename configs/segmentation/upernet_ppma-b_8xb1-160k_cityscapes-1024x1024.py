_base_ = 'upernet_ppma-t_8xb1-160k_cityscapes-1024x1024.py'

model = dict(backbone=dict(arch='base'), decode_head=dict(in_channels=[80, 160, 320, 512]),
             auxiliary_head=dict(in_channels=320),
             test_cfg=dict(stride=(341, 341)))
