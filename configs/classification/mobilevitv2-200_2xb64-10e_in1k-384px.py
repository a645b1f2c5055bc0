# Fine-tune MobileViTv2-2.0 at 384 x 384 on ImageNet-1k, see _base_/mobilevitv2_10e-384px.py.
#   torchrun --nproc_per_node 2 -m subquad train mobilevitv2-200_2xb64-10e_in1k-384px --data FOLDER --amp \
#       --weights runs/mobilevitv2-200_8xb128-300e_in1k/best.safetensors
_base_ = '_base_/mobilevitv2_10e-384px.py'

model = dict(name='subquad_mobilevitv2_200')
