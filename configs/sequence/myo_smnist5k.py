# 4,000 MNIST digits of 16 x 16 pixels in snake order: a small version of sMNIST.
_base_ = 'myo_zmnist5k.py'

model = dict(order='snake')
