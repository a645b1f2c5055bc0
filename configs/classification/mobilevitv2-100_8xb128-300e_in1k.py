# Train MobileViTv2-1.0 on ImageNet-1k with the recipe of its authors, see _base_/mobilevitv2_300e.py.
#   torchrun --nproc_per_node 8 -m subquad train mobilevitv2-100_8xb128-300e_in1k --data FOLDER --amp
_base_ = '_base_/mobilevitv2_300e.py'

model = dict(name='subquad_mobilevitv2_100')
optim_wrapper = dict(optimizer=dict(lr=0.0075, weight_decay=0.013))
