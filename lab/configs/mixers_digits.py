# Compare mixers on scikit-learn's handwritten digits (task digits of lab.compare). Only `model.mixers` and the seed
# change.
_base_ = '../../configs/classification/test-ppma_digits.py'

model = dict(mixers='attention')
train_cfg = dict(max_epochs=16)
