_base_ = ['_base_/models/upernet_ppma.py', '_base_/datasets/ade20k.py',
         '_base_/schedules/adamw_160k.py', '_base_/runtime.py']
