# Train MobileViTv2-1.5 on ImageNet-21k-P, see _base_/mobilevitv2_80e_in21k.py. On each of 4 machines with 8 GPUs:
#   torchrun --nnodes 4 --nproc_per_node 8 ... -m subquad train mobilevitv2-150_32xb128-80e_in21k --data FOLDER --amp \
#       --weights subquad_mobilevitv2_150.apple_in1k
_base_ = '_base_/mobilevitv2_80e_in21k.py'

model = dict(name='subquad_mobilevitv2_150')
optim_wrapper = dict(optimizer=dict(weight_decay=0.029))
