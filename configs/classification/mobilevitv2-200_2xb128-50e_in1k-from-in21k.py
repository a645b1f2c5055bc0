# Fine-tune MobileViTv2-2.0 of ImageNet-21k-P on ImageNet-1k, see _base_/mobilevitv2_50e_in1k.py.
#   torchrun --nproc_per_node 2 -m subquad train mobilevitv2-200_2xb128-50e_in1k-from-in21k --data FOLDER --amp \
#       --weights runs/mobilevitv2-200_32xb128-80e_in21k/best.safetensors
_base_ = '_base_/mobilevitv2_50e_in1k.py'

model = dict(name='subquad_mobilevitv2_200')
