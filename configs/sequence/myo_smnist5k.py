# The same in snake order.
_base_ = 'myo_zmnist5k.py'

model = dict(order='snake')
