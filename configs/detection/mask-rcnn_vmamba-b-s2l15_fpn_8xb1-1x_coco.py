_base_ = 'mask-rcnn_vmamba-b-s2l15_fpn_1x_coco.py'

train_dataloader = dict(batch_size=1)
auto_scale_lr = dict(base_batch_size=8)
