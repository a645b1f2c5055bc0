# The digits config with a small Myo.
_base_ = 'test-ppma_digits.py'

model = dict(name='test_myo')
