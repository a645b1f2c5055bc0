# DINO with four levels and PPMA-T, trained with MMDetection's recipe. The backbone has a tenth of the learning rate,
# so start from a classifier's weights:
#   --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=FILE
_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'

custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)
model = dict(backbone=dict(_delete_=True, type='PPMA', arch='tiny', out_indices=(1, 2, 3)),
             neck=dict(in_channels=[128, 256, 512]))
auto_scale_lr = dict(enable=False, base_batch_size=16)
