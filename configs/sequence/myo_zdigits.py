# scikit-learn's 8 x 8 digits in Morton order: one or two minutes of training.
_base_ = 'myo_zmnist5k.py'

size = (3, 8, 8)
norm = dict(mean=(0.3, 0.3, 0.3), std=(0.4, 0.4, 0.4))

train_dataloader = dict(dataset=dict(type='Digits', transform=dict(input_size=size, **norm)))
test_dataloader = dict(dataset=dict(type='Digits', transform=dict(input_size=size, **norm)))
train_cfg = dict(max_epochs=40)
