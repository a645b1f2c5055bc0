# A language model of about the size of the LCSM paper's Table 4: 44 to 46 M parameters with a vocabulary of 50,265, or
# 43 to 45 M with model.expand_dim=64, which agrees better with the paper's counts. See model_cards/lcsm.md. The
# recipe is the one that the authors publish for WikiText-103 with their earlier model TNN: Adam, 50,000 steps of 128
# windows of 512 tokens, and the inverse square root of the step after 4,000 steps of warm-up. It needs a GPU.
#
# Give --data a text file, which is read byte by byte, or a folder with one text file for each part (train.txt, val.txt,
# test.txt):
#   subquad train lcsm_language --data book.txt --cfg-options model.mixer=1-1-1-4
# For files of token numbers (.npy, or .bin of 16-bit integers) copy this file and set vocab_size in the model and in
# the three data sets.
_base_ = '_base_/tokens.py'

warmup = 4_000

_loader = dict(batch_size=128, dataset=dict(type='TextFiles', root='.', length=512))

model = dict(dim=512, depth=6, num_heads=1, mixer='1-1-1-4', expand_dim=128, gated=False, mlp_ratio=3., drop_rate=0.1)
train_dataloader = dict(**_loader, sampler=dict(_delete_=True, type='InfiniteSampler', shuffle=True))
val_dataloader = _loader
test_dataloader = _loader
val_evaluator = dict(_delete_=True, type='PerplexityMetric')
test_evaluator = dict(_delete_=True, type='PerplexityMetric')
optim_wrapper = dict(optimizer=dict(_delete_=True, opt='adamw', lr=5e-4, betas=(0.9, 0.98), weight_decay=0.2))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-4, by_epoch=False, end=warmup),
    dict(type='InverseSqrtLR', by_epoch=False, begin=warmup)]
train_cfg = dict(_delete_=True, by_epoch=False, max_iters=50_000, val_interval=1_000)
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=1_000), logger=dict(interval=100))
del _loader
