"""Image classification on mmengine's Runner with timm's data pipeline and optimisers.

Importing it registers everything the configs in configs/classification name. Where later features plug in:

    EMA                custom_hooks=[dict(type='EMAHook', ...)], mmengine's own
    mixup, cutmix      the model's data_preprocessor, which sees whole batches on the device
    resuming           Runner(resume=True); SeedHook makes the epochs after it the same as without a break
    several processes  Runner(launcher='pytorch'); DefaultSampler and AccuracyMetric are distributed already
"""
from .. import hooks  # noqa: F401
from . import data, model, sequences  # noqa: F401
