# The digits config with a small Myo.
_base_ = 'test-ppma_digits.py'

model = dict(type='TimmClassifier', name='test_myo', num_classes=10, drop_path_rate=0.05, label_smoothing=0.1)
