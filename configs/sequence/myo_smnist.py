# sMNIST (Table 4 of the Myosotis paper): MNIST's pixels in snake order.
_base_ = 'myo_zmnist.py'

model = dict(order='snake')
