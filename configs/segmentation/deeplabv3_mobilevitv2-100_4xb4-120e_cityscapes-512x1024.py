_base_ = ['_base_/models/deeplabv3_mobilevitv2.py', '_base_/datasets/cityscapes_mobilevitv2.py',
          '_base_/schedules/sgd_120e.py', '_base_/runtime.py']

model = dict(data_preprocessor=dict(size=(512, 1024)), decode_head=dict(num_classes=19),
             auxiliary_head=dict(num_classes=19))
