# Compare mixers in UPerNet on generated shapes (subquad compare --tasks segmentation generates the images).
_base_ = '../segmentation/upernet_test-ppma_shapes.py'

epochs = 16
model = dict(backbone=dict(mixers='attention'))
train_cfg = dict(max_epochs=epochs, val_interval=epochs)
