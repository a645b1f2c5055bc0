# Multi-query associative recall as in Figures 3 to 7 of the LCSM paper: 64 tokens, 4 pairs, a vocabulary of 8,192,
# 100,000 sequences, 64 epochs, and a network of two layers without gates, convolutions and feed-forward layers. It
# needs a GPU.
# The paper takes the best of several learning rates and of the dimensions 32 to 256. Choose a recurrence with
#   --cfg-options model.mixer=1-1-1-0
# and for longer sequences the same length and pairs in the three data sets: (32, 2), (128, 8), (256, 16).
_base_ = '_base_/tokens.py'

_data = dict(type='MQAR', vocab_size=8192, length=64, pairs=4)
_loader = dict(batch_size=512, dataset=_data)

model = dict(vocab_size=8192, dim=128, num_heads=1, mixer='1-0-1-0', expand_dim=128, gated=False, mlp_ratio=0.,
             drop_rate=0.1)
train_dataloader = _loader
val_dataloader = _loader
test_dataloader = _loader
optim_wrapper = dict(optimizer=dict(lr=1e-3))
train_cfg = dict(max_epochs=64)
del _data, _loader
