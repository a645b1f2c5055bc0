# ImageNet-1k in the usual folders, data/imagenet/{train,val}/CLASS/*.JPEG, or below --data FOLDER.
data_root = 'data/imagenet'

model = dict(type='TimmClassifier', num_classes=1000)
train_dataloader = dict(
    batch_size=128, num_workers=8, pin_memory=True, drop_last=True,
    worker_init_fn=dict(type='keep_torch_worker_seeds'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='ImageFolder', root=f'{data_root}/train'))
val_dataloader = dict(
    batch_size=128, num_workers=8, pin_memory=True, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='ImageFolder', root=f'{data_root}/val'))
test_dataloader = val_dataloader
val_cfg = dict()
test_cfg = dict()
