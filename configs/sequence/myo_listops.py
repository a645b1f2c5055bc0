# ListOps (Table 3 of the Myosotis paper): expressions of up to 2,000 tokens with a binary tree. Give --data FOLDER with
# basic_train.tsv, basic_val.tsv and basic_test.tsv of Long Range Arena.
_base_ = '_base_/training.py'

_data = dict(type='LRAListOps', root='.')

model = dict(vocab_size=18, dim=128, depth=8, num_heads=8, arity=2)
train_dataloader = dict(dataset=_data)
val_dataloader = dict(dataset=_data)
test_dataloader = dict(dataset=_data)
optim_wrapper = dict(optimizer=dict(lr=3e-3, weight_decay=0.04))
train_cfg = dict(max_epochs=40)
del _data
