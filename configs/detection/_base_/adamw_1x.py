# PPMA's published recipe: AdamW, learning rate 1e-4, weight decay 0.05, 8 GPUs x 2 images, 12 epochs. Parameters with
# "norm" in their names have no weight decay. The BatchNorm of the stem has weight decay, because its names in the
# authors' code do not contain "norm".
# For another batch size, mmdet's `tools/train.py --auto-scale-lr` scales the learning rate, whose base is 16 images.
# The backbone starts from random weights. To start from a classifier's weights, add
#   --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=FILE
_base_ = ['mmdet::_base_/schedules/schedule_1x.py', 'mmdet::_base_/default_runtime.py']

custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(custom_keys={'norm': dict(decay_mult=0.), 'backbone.stem': dict(decay_mult=1.)}))
