_base_ = 'upernet_ppma-t_8xb2-160k_ade20k-512x512.py'

# Tested on whole images, as published. Windows of stages 3 and 4 as published: at 512 x 512 the maps of 32 x 32 and
# 16 x 16 tokens are padded to 64 x 64 and 32 x 32, which is slow and required for the published weights. All segmenters
# were trained with this drop path rate.
model = dict(
    backbone=dict(_delete_=True, type='MambaVision', arch='tiny', window_size=(64, 32), drop_path_rate=0.2),
    decode_head=dict(in_channels=[80, 160, 320, 640]), auxiliary_head=dict(in_channels=320),
    test_cfg=dict(_delete_=True, mode='whole'))
