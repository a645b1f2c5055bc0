_base_ = ['_base_/models/fpn_ppma.py', '_base_/datasets/ade20k.py',
          '_base_/schedules/adamw_80k.py', '_base_/runtime.py']
