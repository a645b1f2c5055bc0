# RTMDet-s with PPMA-T, trained with MMDetection's recipe: 300 epochs with averaged weights, 8 GPUs x 32 images.
_base_ = 'mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py'

custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)
# Images are RGB, as for PPMA's classifiers; RTMDet's own are BGR. The levels start at stride 8.
model = dict(
    data_preprocessor=dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True),
    backbone=dict(_delete_=True, type='PPMA', arch='tiny', out_indices=(1, 2, 3)),
    neck=dict(in_channels=[128, 256, 512]))
checkpoint = None                       # the base config loads RTMDet's own backbone
auto_scale_lr = dict(enable=False, base_batch_size=256)     # for this schedule; the base config has 16
