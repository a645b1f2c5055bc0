_base_ = 'mask-rcnn_ppma-t_fpn_3x-ms_coco.py'

model = dict(backbone=dict(type='MLLA', drop_path_rate=0.3))
# The names of all norms in the authors' code contain "norm".
optim_wrapper = dict(paramwise_cfg=dict(custom_keys=dict(_delete_=True, norm=dict(decay_mult=0.))))
