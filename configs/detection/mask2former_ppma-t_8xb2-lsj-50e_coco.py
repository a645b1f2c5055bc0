# Mask2Former for instance segmentation with PPMA-T, trained with MMDetection's recipe. The backbone has a tenth of the
# learning rate, so start from a classifier's weights:
#   --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=FILE
_base_ = 'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py'

custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)
model = dict(backbone=dict(_delete_=True, type='PPMA', arch='tiny'),
             panoptic_head=dict(in_channels=[64, 128, 256, 512]))
# Norms have no weight decay. MMEngine applies the longest key that a parameter's name contains.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={
    f'backbone.{layer}': dict(lr_mult=0.1, decay_mult=0.)
    for layer in ('output_norms', *(f'stem.conv{n}.norm' for n in (1, 2, 3, 4)),
                  *(f'stages.{stage}.downsample.norm' for stage in (1, 2, 3)),
                  *(f'stages.{stage}.blocks.{block}.norm{n}'
                    for stage, depth in enumerate((2, 2, 8, 2)) for block in range(depth) for n in (1, 2)))}))
