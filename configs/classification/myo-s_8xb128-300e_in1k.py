# Train Myo-S on ImageNet-1k with the recipe of PPMA-S.
#   torchrun --nproc_per_node 8 -m subquad train myo-s_8xb128-300e_in1k --data FOLDER --amp
_base_ = '_base_/ppma_300e.py'

model = dict(name='myo_small', drop_path_rate=0.15)
