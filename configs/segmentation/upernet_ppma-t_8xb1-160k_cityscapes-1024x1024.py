_base_ = ['_base_/models/upernet_ppma.py', '_base_/datasets/cityscapes.py',
         '_base_/schedules/adamw_160k.py', '_base_/runtime.py']

model = dict(
    data_preprocessor=dict(size=(1024, 1024)), decode_head=dict(num_classes=19), auxiliary_head=dict(num_classes=19),
    test_cfg=dict(crop_size=(1024, 1024), stride=(768, 768)))
train_cfg = dict(val_interval=4000)
