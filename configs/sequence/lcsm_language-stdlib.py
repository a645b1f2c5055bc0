# A tiny language model of the bytes of Python's standard library, minutes on one CPU core. Compare recurrences with
#   subquad train lcsm_language-stdlib --cfg-options model.mixer=1-10-1-0
# or in one go with
#   python -m lab.config_sweeps language --record language.jsonl
_base_ = 'lcsm_language.py'

warmup = 50

_data = dict(_delete_=True, type='StandardLibrary', length=128)

model = dict(dim=96, depth=2, num_heads=3, expand_dim=16, mlp_ratio=2., drop_rate=0.)
train_dataloader = dict(batch_size=16, dataset=dict(**_data, split='train'))
val_dataloader = dict(batch_size=32, dataset=dict(**_data, split='val', most=40_000))
test_dataloader = dict(batch_size=32, dataset=dict(**_data, split='test', most=80_000))
optim_wrapper = dict(optimizer=dict(lr=5e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, end=warmup),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=warmup, T_max=550, eta_min_ratio=0.01)]
train_cfg = dict(max_iters=600, val_interval=300)
del _data
