# Compare mixers on a long-range copy in images (task copy of lab.compare): the color of a patch in one corner is
# asked for at the opposite corner of 16 x 16 tokens. Two blocks without a mixer see 9 x 9 tokens: only mixers reach it.
_base_ = '_base_/flat.py'

_data = dict(type='DistantCopy', size=64, patch=4, classes=8, distractors=4)

model = dict(output='places', num_classes=8, patch_size=4, dim=48, depth=2, num_heads=4)
train_dataloader = dict(dataset=dict(**_data, count=2000))
test_dataloader = dict(dataset=dict(**_data, count=500))
train_cfg = dict(max_epochs=6)
del _data
