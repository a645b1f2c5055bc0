# Pathfinder (Table 3 of the Myosotis paper): 32 x 32 pixels as a sequence of 1,024 in snake order. Give --data FOLDER
# with Long Range Arena's pathfinder32.
_base_ = '_base_/training.py'

_data = dict(type='LRAPathfinder', root='.', size=32)

model = dict(num_classes=2, in_chans=1, dim=192, depth=6, num_heads=12, order='snake')
train_dataloader = dict(dataset=_data)
val_dataloader = dict(dataset=_data)
test_dataloader = dict(dataset=_data)
optim_wrapper = dict(optimizer=dict(lr=4e-3, weight_decay=0.03))
train_cfg = dict(max_epochs=200)
del _data
