# Compare mixers on generated ListOps expressions of 20 to 63 tokens (task listops of lab.compare). The tokens are a
# map of one row. Padding is a token of its own for the mixers, and is left out of the mean that the classifier reads.
_base_ = '_base_/flat.py'

_data = dict(type='ListOps', min_length=19, max_length=64, max_depth=4, max_args=5)

model = dict(vocab_size=18, num_classes=10, dim=64, depth=4, num_heads=4)
train_dataloader = dict(dataset=dict(**_data, count=10_000))
test_dataloader = dict(dataset=dict(**_data, count=2000))
train_cfg = dict(max_epochs=5)
del _data
