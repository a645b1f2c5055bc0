# Train a small Myo on scikit-learn's handwritten digits.
_base_ = 'test-ppma_digits.py'

model = dict(name='test_myo')
