# zMNIST (Table 4 of the Myosotis paper): MNIST's 784 pixels in Morton order. Give --data FOLDER with the four idx
# files.
_base_ = '_base_/training.py'

_data = dict(type='MNIST', root='.', transform=dict(
    input_size=(1, 28, 28), crop_pct=1.0, mean=(0.1307,), std=(0.3081,)))

model = dict(in_chans=1, order='morton')
train_dataloader = dict(dataset=_data)
val_dataloader = dict(dataset=_data)
test_dataloader = dict(dataset=_data)
del _data
