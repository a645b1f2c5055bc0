# Train on generated ListOps expressions, without a download. 96,000 expressions are generated in seconds from a seed.
_base_ = 'myo_listops.py'

_data = dict(_delete_=True, type='ListOps')

train_dataloader = dict(dataset=dict(**_data, split='train'))
val_dataloader = dict(dataset=dict(**_data, split='val'))
test_dataloader = dict(dataset=dict(**_data, split='test'))
del _data
