# Pathfinder-like images of 32 x 32 pixels, generated when training starts. They are not the original data.
_base_ = 'myo_pathfinder.py'

train_dataloader = dict(dataset=dict(_delete_=True, type='PathfinderLike', split='train'))
val_dataloader = dict(dataset=dict(_delete_=True, type='PathfinderLike', split='val'))
test_dataloader = dict(dataset=dict(_delete_=True, type='PathfinderLike', split='test'))
