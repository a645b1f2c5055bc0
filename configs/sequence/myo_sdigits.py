# The same in snake order.
_base_ = 'myo_zdigits.py'

model = dict(order='snake')
