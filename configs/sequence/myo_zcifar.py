# zCIFAR (Table 4 of the Myosotis paper): CIFAR-10's 1,024 pixels in Morton order, with 45,000 images for training,
# 5,000 for validation and 10,000 for testing. There is no augmentation. Give --data FOLDER with the Python batches.
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
