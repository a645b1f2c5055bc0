# Compare mixers on generated Pathfinder-like images (task pathfinder of lab.compare): do two dots lie on one curve?
# The images of 32 x 32 are enlarged to 64 x 64, so that the skeleton's first stage has 16 x 16 tokens.
_base_ = '../../configs/classification/test-ppma_digits.py'

_data = dict(type='PathfinderLike', dashes=4, distractors=0)
_images = dict(input_size=(3, 64, 64), interpolation='bilinear', mean=(0.08,) * 3, std=(0.19,) * 3)

model = dict(mixers='attention', num_classes=2)
train_dataloader = dict(dataset=dict(**_data, count=6000, transform=dict(
    is_training=True, scale=(1., 1.), ratio=(1., 1.), hflip=0.5, vflip=0.5, **_images)))
test_dataloader = dict(dataset=dict(**_data, count=1200, transform=_images))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=1, eta_min_ratio=0.005, convert_to_iter_based=True)]
test_evaluator = dict(topk=(1,))
train_cfg = dict(max_epochs=5)
del _data, _images
