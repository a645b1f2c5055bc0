"""Register the hooks, the model, its preprocessor, the metrics and the optimizer that classification configs name.

A config imports it by `custom_imports`, beside `subquad.tools.data.registry`. Extend a config as with any MMEngine
config:

    EMA                custom_hooks=[dict(type='ModelEMAHook', decay=...)]
    mixup, CutMix      model=dict(data_preprocessor=dict(type='MixupPreprocessor', ...))
    distillation       model=dict(distillation=dict(type='Distillation', teacher=dict(weights=...)))
    MESA               custom_hooks=[dict(type='ModelEMAHook', decay=...), dict(type='MESAHook')]
"""
from .classification import distillation, mesa, model, pixels, prediction_metrics  # noqa: F401
from .training import averaging, hooks, schedules  # noqa: F401
