# Compare mixers on scikit-learn's handwritten digits (subquad compare --tasks digits). Only `model.mixers` and the seed
# change.
_base_ = '../classification/test-ppma_digits.py'

model = dict(mixers='attention')
train_cfg = dict(max_epochs=16)
