# Train LCSM-T on ImageNet-1k with the recipe of PPMA-T.
#   torchrun --nproc_per_node 8 -m subquad train lcsm-t_8xb128-300e_in1k --data FOLDER --amp
_base_ = '_base_/ppma_300e.py'

model = dict(name='lcsm_tiny', drop_path_rate=0.1)
