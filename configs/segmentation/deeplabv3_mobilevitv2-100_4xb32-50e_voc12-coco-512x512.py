_base_ = ['_base_/models/deeplabv3_mobilevitv2.py', '_base_/datasets/voc12-coco_mobilevitv2.py',
         '_base_/schedules/adamw_50e.py', '_base_/runtime.py']

model = dict(backbone=dict(output_stride=16), decode_head=dict(dilations=(6, 12, 18), num_classes=21),
             auxiliary_head=dict(num_classes=21))
