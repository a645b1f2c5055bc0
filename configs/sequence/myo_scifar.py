# sCIFAR (the paper's table 4): myo_zcifar in snake order.
_base_ = 'myo_zcifar.py'

model = dict(order='snake')
