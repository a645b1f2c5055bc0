# scikit-learn's 8 x 8 digits in snake order: one or two minutes of training.
_base_ = 'myo_zdigits.py'

model = dict(order='snake')
