# sCIFAR (Table 4 of the Myosotis paper): CIFAR-10's pixels in snake order.
_base_ = 'myo_zcifar.py'

model = dict(order='snake')
