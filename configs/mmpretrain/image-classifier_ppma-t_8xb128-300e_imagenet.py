# PPMA-T as the backbone of MMPretrain's ImageClassifier, for MMPretrain's own train and test tools. The data and their
# augmentation are those of its Swin configs; schedule, drop path and mixing are those of PPMA's authors. The network
# differs from the timm model ppma_tiny: a linear layer follows the pooled features, so the authors' accuracy is not
# that of this config, and a classifier's file of theirs starts the backbone only (init_cfg).
_base_ = ['mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py', 'mmpretrain::_base_/default_runtime.py',
          'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py']
custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)

model = dict(
    type='ImageClassifier',
    backbone=dict(type='PPMA', arch='tiny', out_indices=(3,)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=1000, in_channels=512,
              loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]))
train_dataloader = dict(batch_size=128, sampler=dict(_delete_=True, type='RepeatAugSampler'))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=5)]
