# Shared by the tasks whose tokens must keep their places: the skeleton's blocks without downsampling, AdamW, cosine.
_base_ = '../../../configs/classification/_base_/runtime.py'

custom_imports = dict(imports=['subquad.tools.data.registry', 'subquad.tools.engine.registry',
                               'lab.flat_network'], allow_failed_imports=False)
model = dict(type='TimmClassifier', name='flat_network', mixers='attention')
train_dataloader = dict(batch_size=64, num_workers=0, drop_last=True, sampler=dict(type='DefaultSampler', shuffle=True),
                        dataset=dict(split='train'))
test_dataloader = dict(batch_size=100, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
                       dataset=dict(split='test'))
test_evaluator = dict(topk=(1,))
optim_wrapper = dict(constructor='TimmOptimizerConstructor', clip_grad=dict(max_norm=1.0),
                     optimizer=dict(opt='adamw', lr=2e-3, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=1, eta_min_ratio=0.01, convert_to_iter_based=True)]
train_cfg = dict(by_epoch=True, max_epochs=10)
test_cfg = dict()
