# zCIFAR (the paper's table 4): CIFAR-10's pixels in Morton order, 1,024 of them; 45,000 images to train, 5,000 to
# validate, 10,000 to test, no augmentation. --data FOLDER with the Python batches.
_base_ = '_base_/training.py'

_data = dict(type='CIFAR10', root='.', transform=dict(
    input_size=(3, 32, 32), crop_pct=1.0, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)))

model = dict(dim=512, depth=6, num_heads=16, order='morton')
train_dataloader = dict(dataset=_data)
val_dataloader = dict(dataset=_data)
test_dataloader = dict(dataset=_data)
optim_wrapper = dict(optimizer=dict(lr=4.5e-3, weight_decay=0.07))
train_cfg = dict(max_epochs=250)
del _data
