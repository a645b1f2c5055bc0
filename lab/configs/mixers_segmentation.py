# Compare mixers in UPerNet on generated shapes (task segmentation of lab.compare generates the images).
_base_ = '../../configs/segmentation/upernet_test-ppma_shapes.py'

epochs = 16
model = dict(backbone=dict(mixers='attention'))
train_cfg = dict(max_epochs=epochs, val_interval=epochs)
