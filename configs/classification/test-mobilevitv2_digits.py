# Train a small MobileViTv2 on scikit-learn's handwritten digits. Images are resized to 64 x 64, so that the map at
# stride 32 has 2 x 2 tokens.
_base_ = 'test-ppma_digits.py'

size = (3, 64, 64)

model = dict(name='test_mobilevitv2')
train_dataloader = dict(dataset=dict(transform=dict(input_size=size)))
test_dataloader = dict(dataset=dict(transform=dict(input_size=size)))
