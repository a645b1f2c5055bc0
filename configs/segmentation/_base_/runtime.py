# Shared by all segmentation configs.
default_scope = 'mmseg'
custom_imports = dict(imports=['subquad.backbones.mm'], allow_failed_imports=False)
env_cfg = dict(cudnn_benchmark=True, mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
               dist_cfg=dict(backend='nccl'))
visualizer = dict(type='SegLocalVisualizer', name='visualizer', vis_backends=[dict(type='LocalVisBackend')])
log_level = 'INFO'
load_from = None
resume = False
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
tta_model = dict(type='SegTTAModel')
