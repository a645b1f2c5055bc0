# Pathfinder-like scenes by program, not the original data: 32 x 32, made when training starts.
_base_ = 'myo_pathfinder.py'

train_dataloader = dict(dataset=dict(_delete_=True, type='PathfinderLike', split='train'))
val_dataloader = dict(dataset=dict(_delete_=True, type='PathfinderLike', split='val'))
test_dataloader = dict(dataset=dict(_delete_=True, type='PathfinderLike', split='test'))
