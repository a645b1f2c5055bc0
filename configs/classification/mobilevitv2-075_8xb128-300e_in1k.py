# Train MobileViTv2-0.75 on ImageNet-1k with the recipe of its authors, see _base_/mobilevitv2_300e.py.
#   torchrun --nproc_per_node 8 -m subquad train mobilevitv2-075_8xb128-300e_in1k --data FOLDER --amp
_base_ = '_base_/mobilevitv2_300e.py'

lr = 0.009
warmup = 16                                         # epochs, which are the authors' 20,000 steps

model = dict(name='subquad_mobilevitv2_075')
optim_wrapper = dict(optimizer=dict(lr=lr, weight_decay=0.008))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6 / lr, by_epoch=True, end=warmup, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=warmup, eta_min_ratio=0.1, convert_to_iter_based=True)]
