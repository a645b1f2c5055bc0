# Multi-query associative recall at a small size: minutes on one CPU core. A vocabulary of 256, 16,000 sequences, and a
# convolution of three tokens before each recurrence, as in Mamba. Without it, the paper's network needs many more steps
# to learn that a value belongs to the token before it. The sweeps of recurrences and learning rates are in
# lab/config_sweeps.py:
#   python -m lab.config_sweeps recall --record recall.jsonl
_base_ = 'lcsm_mqar.py'

_data = dict(vocab_size=256)

model = dict(vocab_size=256, dim=64, num_heads=4, expand_dim=16, conv_size=3, drop_rate=0.)
train_dataloader = dict(batch_size=64, dataset=dict(**_data, count=16_000))
val_dataloader = dict(batch_size=250, dataset=dict(**_data, count=500))
test_dataloader = dict(batch_size=250, dataset=dict(**_data, count=3000))
optim_wrapper = dict(optimizer=dict(lr=5e-3))
train_cfg = dict(max_epochs=6)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, end=50),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, eta_min_ratio=0.01, convert_to_iter_based=True)]
del _data
