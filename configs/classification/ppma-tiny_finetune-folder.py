# Fine-tune PPMA-T on a few hundred of your own photographs:
#   subquad train ppma-tiny_finetune-folder --weights FILE --data FOLDER
# FOLDER contains train/CLASS/* and val/CLASS/*. FILE is the authors' file of ppma_tiny or a file of `subquad train`.
# Add --model NAME to fine-tune another model. Layers near the input have lower learning rates (layer_decay),
# augmentation is light, and the first validation evaluates the weights before training.
_base_ = 'ppma-tiny_folder.py'

epochs = 20
warmup = 2
train = dict(input_size=(3, 224, 224), is_training=True, scale=(0.35, 1.0), color_jitter=0.2, interpolation='bicubic')

train_dataloader = dict(batch_size=32, dataset=dict(transform=dict(_delete_=True, **train)))
optim_wrapper = dict(optimizer=dict(lr=2e-4, layer_decay=0.75))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=warmup, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=warmup, eta_min_ratio=0.01, convert_to_iter_based=True)]
train_cfg = dict(max_epochs=epochs)
custom_hooks = [dict(type='EvaluateAtStartHook')]
