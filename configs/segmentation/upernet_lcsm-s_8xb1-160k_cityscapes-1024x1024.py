_base_ = 'upernet_ppma-s_8xb1-160k_cityscapes-1024x1024.py'

model = dict(backbone=dict(type='LCSM'))
