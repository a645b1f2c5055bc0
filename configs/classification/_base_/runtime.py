# Shared by all classification configs: registered types, hooks and the seed.
custom_imports = dict(imports=['subquad.tools.data.registry', 'subquad.tools.engine.registry'],
                      allow_failed_imports=False)
default_scope = 'mmengine'
default_hooks = dict(logger=dict(type='LoggerHook', interval=50),
                     checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=2))
randomness = dict(seed=0)
val_evaluator = dict(type='AccuracyMetric')
test_evaluator = dict(type='AccuracyMetric')
