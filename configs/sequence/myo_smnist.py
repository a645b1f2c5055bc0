# sMNIST (the paper's table 4): myo_zmnist in snake order.
_base_ = 'myo_zmnist.py'

model = dict(order='snake')
