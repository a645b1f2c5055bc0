# Path-X (Table 3 of the Myosotis paper): 128 x 128 pixels as a sequence of 16,384 in snake order. Give --data FOLDER
# with Long Range Arena's pathfinder128.
_base_ = 'myo_pathfinder.py'

train_dataloader = dict(dataset=dict(size=128))
val_dataloader = dict(dataset=dict(size=128))
test_dataloader = dict(dataset=dict(size=128))
