# Path-X-like images of 128 x 128 pixels, generated when training starts. They are not the original data.
_base_ = 'myo_pathx.py'

train_dataloader = dict(dataset=dict(_delete_=True, type='PathXLike', split='train'))
val_dataloader = dict(dataset=dict(_delete_=True, type='PathXLike', split='val'))
test_dataloader = dict(dataset=dict(_delete_=True, type='PathXLike', split='test'))
