# Train on short generated ListOps expressions of 50 to 128 tokens: a first run on two CPU cores.
_base_ = 'myo_listops.py'

_data = dict(_delete_=True, type='ListOps', min_length=50, max_length=128)

model = dict(dim=64, depth=4, num_heads=8)
train_dataloader = dict(dataset=dict(**_data, split='train', count=20_000))
val_dataloader = dict(dataset=dict(**_data, split='val'))
test_dataloader = dict(dataset=dict(**_data, split='test'))
train_cfg = dict(max_epochs=10)
del _data
