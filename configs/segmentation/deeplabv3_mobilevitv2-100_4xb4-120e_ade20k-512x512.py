_base_ = ['_base_/models/deeplabv3_mobilevitv2.py', '_base_/datasets/ade20k_mobilevitv2.py',
         '_base_/schedules/sgd_120e.py', '_base_/runtime.py']
