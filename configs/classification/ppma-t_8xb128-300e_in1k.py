# Train PPMA-T on ImageNet-1k with the recipe of its authors, see _base_/ppma_300e.py.
#   torchrun --nproc_per_node 8 -m subquad train ppma-t_8xb128-300e_in1k --data FOLDER --amp
_base_ = '_base_/ppma_300e.py'

model = dict(name='ppma_tiny', drop_path_rate=0.1)
