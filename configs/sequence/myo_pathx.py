# Path-X (table 3 of the Myosotis paper): 128 x 128 pixels, 16,384 of them in snake order. --data FOLDER with Long Range
# Arena's pathfinder128.
_base_ = 'myo_pathfinder.py'

train_dataloader = dict(dataset=dict(size=128))
val_dataloader = dict(dataset=dict(size=128))
test_dataloader = dict(dataset=dict(size=128))
