# Train a small LCSM on scikit-learn's handwritten digits.
_base_ = 'test-ppma_digits.py'

model = dict(name='test_lcsm')
