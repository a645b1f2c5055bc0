"""Register the hooks, the model, the metric and the optimizer that classification configs name.

A config imports it by `custom_imports`, beside `subquad.tools.data.registry`. Extend a config as with any MMEngine
config:

    EMA                custom_hooks=[dict(type='EMAHook', ...)]
    mixup, cutmix      the model's data_preprocessor, which receives whole batches on the device
    resuming           Runner(resume=True); SeedHook makes a resumed run reproduce an uninterrupted one
    several processes  Runner(launcher='pytorch'); DefaultSampler and AccuracyMetric support it
"""
from . import hooks, inverse_sqrt  # noqa: F401
from .classification import model  # noqa: F401
