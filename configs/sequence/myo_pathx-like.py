# Path-X-like scenes by program, not the original data: 128 x 128, made when training starts.
_base_ = 'myo_pathx.py'

train_dataloader = dict(dataset=dict(_delete_=True, type='PathXLike', split='train'))
val_dataloader = dict(dataset=dict(_delete_=True, type='PathXLike', split='val'))
test_dataloader = dict(dataset=dict(_delete_=True, type='PathXLike', split='test'))
